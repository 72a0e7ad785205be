"""``commlayer sim``: explore schedules of simulated transports."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import typer
from commlayer_tools.output import JSON, print_json, print_table

from commlayer_testkit.commands.check import check

if TYPE_CHECKING:
    from commlayer_testkit.sim.explorer import Report, Run

MODULE = typer.Option([], "--module", "-m", help="Import a module that registers scenarios.")
TRACE = typer.Option(None, "--trace", help="Write a Chrome trace of virtual time to this file.")


def register(app: typer.Typer) -> None:
    sim = typer.Typer(
        help="Explore schedules of simulated transports, and replay the ones that fail.",
        no_args_is_help=True,
    )
    sim.command("list")(list_scenarios)
    sim.command()(explore)
    sim.command()(replay)
    sim.command()(check)
    app.add_typer(sim, name="sim")


def list_scenarios(json: bool = JSON, module: list[str] = MODULE) -> None:
    """List scenarios, what each is expected to end in, and the profiles it runs on."""
    _require_greenlet()
    from commlayer_testkit.sim.profiles import PROFILES
    from commlayer_testkit.sim.scenario import all_scenarios

    _import(module)
    found = all_scenarios().values()
    if json:
        print_json(
            {
                "scenarios": [
                    {
                        "name": s.name,
                        "expect": s.expect.value if s.expect else None,
                        "profiles": s.profiles,
                        "doc": s.doc,
                    }
                    for s in found
                ],
                "profiles": {
                    p.name: {"note": p.note, **p.semantics.facts()} for p in PROFILES.values()
                },
            }
        )
        return
    print_table(
        ["scenario", "ends in", "profiles", "what"],
        [
            (
                s.name,
                s.expect.value if s.expect else "fine",
                s.profiles,
                s.doc.split("\n")[0],
            )
            for s in found
        ],
    )
    print_table(["profile", "what"], [(p.name, p.note) for p in PROFILES.values()])


def explore(
    scenario: str = typer.Argument(help="Name of a scenario; see `list`."),
    strategy: str = typer.Option("dfs", help="dfs, random or pct."),
    budget: int = typer.Option(10_000, min=1, help="Most schedules to run."),
    seconds: float | None = typer.Option(None, min=0, help="Most seconds to run."),
    profile: str | None = typer.Option(None, help="Transport; default: the scenario's first."),
    seed: int = typer.Option(0, min=0, help="Seed of random and pct."),
    preemptions: int | None = typer.Option(None, min=0, help="Bound of dfs on preemptions."),
    deviations: int | None = typer.Option(
        None, min=0, help="Bound of dfs on deviations from the default schedule."
    ),
    trace: str | None = TRACE,
    json: bool = JSON,
    module: list[str] = MODULE,
) -> None:
    """Explore a scenario.  Exit code 0 if it ends as expected, 1 if not."""
    _require_greenlet()
    from commlayer_testkit.sim import explorer
    from commlayer_testkit.sim.choices import ReplayChoices
    from commlayer_testkit.sim.profiles import profile as named
    from commlayer_testkit.sim.scenario import find

    _import(module)
    found = find(scenario)
    report = explorer.explore(
        found,
        on=profile,
        strategy=strategy,  # type: ignore[arg-type]
        budget=budget,
        seconds=seconds,
        seed=seed,
        preemptions=preemptions,
        deviations=deviations,
    )
    if trace is not None:
        run = explorer.run(
            found, named(report.profile), ReplayChoices(report.choices), explain=True, logged=True
        )
        _write(trace, run)
    kind = report.failure.kind if report.failure else None
    if json:
        print_json(
            {**_report(report), "expected": found.expect, "as_expected": kind is found.expect}
        )
    else:
        typer.echo(str(report))
        expected = found.expect.value if found.expect else "no failure"
        typer.echo(f"expected: {expected}" + ("" if kind is found.expect else ", which it is not"))
    raise typer.Exit(0 if kind is found.expect else 1)


def replay(
    string: str = typer.Argument(help="The string that a failure printed."),
    trace: str | None = TRACE,
    json: bool = JSON,
    module: list[str] = MODULE,
) -> None:
    """Run one schedule again.  Exit code 0 if it fails as it did, 1 if it does not fail."""
    _require_greenlet()
    from commlayer_testkit.sim import explorer

    _import(module)
    run = explorer.replay(string, logged=trace is not None)
    if trace is not None:
        _write(trace, run)
    if json:
        print_json({"replay": string, "steps": run.steps, "failure": run.failure})
    else:
        typer.echo(f"{run.steps} steps")
        typer.echo(str(run.failure) if run.failure else "no failure")
    raise typer.Exit(0 if run.failure else 1)


def _report(report: Report) -> dict[str, Any]:
    return {
        "scenario": report.scenario,
        "profile": report.profile,
        "strategy": report.strategy,
        "schedules": report.schedules,
        "pruned": report.pruned,
        "cut_by_step_bound": report.steps_bound_hit,
        "exhausted": report.exhausted,
        "bound": report.bound,
        "seconds": report.seconds,
        "schedules_per_second": report.per_second,
        "failure": report.failure,
        "found_after": report.found_after,
        "replay": report.replay,
    }


def _write(path: str, run: Run) -> None:
    from commlayer_testkit.sim.trace import write_trace

    write_trace(path, run.log)


def _import(modules: list[str]) -> None:
    from commlayer.errors import CommError, ErrorKind

    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise CommError(
                ErrorKind.CONFIG, f"module {module!r}", str(error), "Check name and PYTHONPATH"
            ) from error


def _require_greenlet() -> None:
    from commlayer.errors import CommError, ErrorKind

    try:
        import greenlet  # noqa: F401
    except ImportError as error:
        raise CommError(
            ErrorKind.CONFIG, "commlayer sim", "greenlet is not installed",
            "Install it with: pip install 'commlayer[sim]'",
        ) from error  # fmt: skip
