"""``commlayer conformance NAME``: prove a backend, or compare two proofs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from commlayer_tools.output import print_table

if TYPE_CHECKING:
    from commlayer_testkit.conformance.probes.report import ProbeReport
    from commlayer_testkit.conformance.report import Certificate
    from commlayer_testkit.conformance.rules import Rule
    from commlayer_testkit.conformance.verdict import Verdict

_MARKS = {
    "passed": ("pass", "green"),
    "failed": ("FAIL", "bold red"),
    "not_applicable": ("-", "dim"),
    "not_run": ("not run", "yellow"),
}


def register(app: typer.Typer) -> None:
    app.command()(conformance)


def conformance(
    what: list[str] = typer.Argument(
        None, metavar="NAME | compare A.json B.json", help="A backend, or two certificates."
    ),
    level: str = typer.Option("L2", help="Highest level to run: L0 to L4."),
    rule: list[str] = typer.Option([], help="Run this rule only; may be given several times."),
    deviations: Path | None = typer.Option(None, help="TOML file of rules that are known to fail."),
    measured: Path | None = typer.Option(
        None, help="Report of `commlayer probe NAME --json`; an over-claimed fact fails."
    ),
    json: Path | None = typer.Option(None, "--json", help="Write the certificate to this file."),
    schedules: int = typer.Option(200, min=1, help="Most schedules of each simulated search."),
    seed: int = typer.Option(0, min=0, help="Seed of random schedules."),
    specification: bool = typer.Option(
        False, "--specification", help="Print the specification and exit."
    ),
) -> None:
    """Check a backend against the specification.

    Exit code 0 when the level asked for is reached, 1 when it is not, with
    `compare` 1 when the second certificate has lost something.
    """
    if specification:
        from commlayer_testkit.conformance.specification import specification as page

        typer.echo(page(), nl=False)
        return
    match what or []:
        case ["compare", before, after]:
            _compare(Path(before), Path(after))
        case [name] if name != "compare":
            _run(name, level, rule, deviations, measured, json, schedules, seed)
        case _:
            raise typer.BadParameter("expected NAME, or compare A.json B.json")


def _run(
    name: str,
    level: str,
    only: list[str],
    deviations: Path | None,
    measured: Path | None,
    json: Path | None,
    schedules: int,
    seed: int,
) -> None:
    from commlayer_testkit.conformance.deviations import load
    from commlayer_testkit.conformance.lab import Lab
    from commlayer_testkit.conformance.report import bound, certify
    from commlayer_testkit.conformance.rules import Level, find_rule
    from commlayer_testkit.conformance.runner import judge
    from commlayer_testkit.conformance.subject import Subject

    if only and json:
        raise typer.BadParameter("--json writes a certificate, and --rule judges no whole level")
    try:
        asked = Level(level)
    except ValueError:
        raise typer.BadParameter(f"{level!r} is not one of L0 to L4") from None
    subject = Subject(name)
    every = subject.rules()
    known = load(deviations, every) if deviations else {}
    facts = bound(_read_measured(measured), subject) if measured else None
    rules = [find_rule(identifier, every) for identifier in only] or subject.rules(asked)
    verdicts = []
    with Lab(subject, seed=seed, schedules=schedules) as lab:
        for current in rules:
            verdicts.append(judge(current, lab))
            _progress(current, verdicts[-1])
    if only:
        held = {"passed", "not_applicable"}
        raise typer.Exit(int(any(v.outcome.value not in held for v in verdicts)))
    certificate = certify(subject, asked, verdicts, known, facts)
    _print(certificate)
    if json:
        json.write_bytes(certificate.encode())
    raise typer.Exit(0 if certificate.ok else 1)


def _read_measured(path: Path) -> ProbeReport:
    import msgspec

    from commlayer.errors import CommError, ErrorKind
    from commlayer_testkit.conformance.probes.report import ProbeReport

    try:
        return msgspec.json.decode(path.read_bytes(), type=ProbeReport)
    except (OSError, msgspec.MsgspecError) as error:
        raise CommError(
            ErrorKind.CONFIG, f"probe report {path}", str(error), "Write it: commlayer probe --json"
        ) from error


def _progress(rule: Rule, verdict: Verdict) -> None:
    typer.echo(f"{verdict.rule:<26} {verdict.outcome.value:<15} {verdict.seconds:6.2f} s")
    if verdict.outcome.value == "failed":
        typer.echo(f"    {rule.clause.text}\n    {verdict.message}")


def _print(certificate: Certificate) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from commlayer_testkit.conformance.rules import Level

    excused = {deviation.rule: deviation for deviation in certificate.deviations}
    cells: dict[str, dict[str, Text]] = {}
    for verdict in certificate.verdicts:
        level, _, clause = verdict.rule.partition("-")
        mark, style = _MARKS[verdict.outcome.value]
        if verdict.rule in excused and verdict.rule not in certificate.errors:
            mark, style = excused[verdict.rule].kind.value, "yellow"
        cells.setdefault(clause, {})[level] = Text(mark, style=style)
    columns = [known for known in Level if certificate.asked.includes(known)]
    table = Table(title=f"{certificate.backend}: specification {certificate.specification}")
    table.add_column("clause", no_wrap=True)
    for column in columns:
        table.add_column(f"{column.value}\n{column.heading}")
    for clause, row in cells.items():
        table.add_row(clause, *(row.get(column.value, Text("")) for column in columns))
    Console().print(table)
    for name, version in certificate.versions.items():
        typer.echo(f"{name} {version}")
    for deviation in certificate.deviations:
        typer.echo(f"deviation {deviation.rule}: {deviation.kind.value}, {deviation.reason}")
    for name, text in certificate.errors.items():
        typer.echo(f"error {name}: {text.splitlines()[0]}")
    reached = certificate.level.value if certificate.level else "none"
    simulated = " (simulated only: nothing was sent)" if certificate.simulated_only else ""
    excuses = ", ".join(f"{d.rule} ({d.kind.value})" for d in certificate.deviations)
    but = f", excused: {excuses}" if excuses else ""
    typer.echo(f"level reached: {reached} of {certificate.asked.value} asked{simulated}{but}")
    for text in certificate.does_not_prove:
        typer.echo(f"not proved: {text}")


def _compare(before: Path, after: Path) -> None:
    from commlayer.errors import CommError, ErrorKind
    from commlayer_testkit.conformance.report import compare, decode, regressions

    try:
        one, two = decode(before.read_bytes()), decode(after.read_bytes())
    except OSError as error:
        raise CommError(
            ErrorKind.CONFIG, "compare", str(error), "Name two readable files"
        ) from error
    rows = compare(one, two)
    if rows:
        print_table(["what", before.name, after.name], rows)
    else:
        typer.echo("no difference")
    lost = regressions(one, two)
    if lost:
        typer.echo(f"lost: {', '.join(lost)}")
    raise typer.Exit(int(bool(lost)))
