"""``commlayer doctor``: can ranks talk here, and if not, what is in the way?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from commlayer_tools.output import JSON, print_json

if TYPE_CHECKING:
    from commlayer_tools.doctor.checks import Check, Diagnosis


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    quick: bool = typer.Option(False, "--quick", help="Start no processes and talk to nobody."),
    seconds: float = typer.Option(
        2.0, "--seconds", min=0.1, max=60.0, help="How long ranks talk in a self-test."
    ),
    json: bool = JSON,
) -> None:
    """Look at this machine, and let two processes talk over each backend that can run here.

    Under torchrun every rank runs it: the ranks compare versions, facts and settings
    and talk to each other, and rank 0 prints.  Exit code 1 if anything has failed.
    """
    from commlayer.registry import default_registry
    from commlayer_tools.doctor import agreement, machine, selftest
    from commlayer_tools.doctor.checks import Diagnosis

    registry = default_registry()
    entries = registry.survey()
    found = list(machine.checks(registry, entries))
    rank = 0
    if not quick:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, more = agreement.examine(registry, seconds)
            found += more
        else:
            found += [
                selftest.run(entry.loaded.backend, seconds)
                for entry in entries
                if entry.loaded is not None and machine.testable(entry)
            ]
    diagnosis = Diagnosis(machine.facts(entries), tuple(found))
    if rank == 0:
        if json:
            print_json({"ok": diagnosis.ok, "checks": diagnosis.checks, "facts": diagnosis.facts})
        else:
            _print(diagnosis)
    if not diagnosis.ok:
        raise typer.Exit(1)


def _print(diagnosis: Diagnosis) -> None:
    facts = diagnosis.facts
    system = facts["system"]
    typer.echo(
        f"commlayer {facts['commlayer']['version'] or '(not installed)'}, Python "
        f"{system['python']}, torch {facts['torch']['version']}, {system['cores']} cores, "
        f"{system['host']}"
    )
    devices = ", ".join(f"{each['device']} ({each['name']})" for each in facts["devices"])
    typer.echo(f"devices: {devices or 'none but the CPU'}")
    for each in facts["interfaces"]:
        typer.echo(
            f"{each['name']} ({each['state']}): {', '.join(each['addresses']) or 'no address'}"
        )
    for name, value in facts["environment"].items():
        typer.echo(f"{name}={value}")
    typer.echo()
    for check in diagnosis.checks:
        _print_check(check)
    failed = sum(check.status == "failed" for check in diagnosis.checks)
    warned = sum(check.status == "warning" for check in diagnosis.checks)
    typer.echo(f"\n{failed} failed, {warned} to look at")


_MARKS = {"ok": ("ok  ", typer.colors.GREEN), "absent": ("--  ", typer.colors.BRIGHT_BLACK),
          "warning": ("look", typer.colors.YELLOW),
          "failed": ("FAIL", typer.colors.RED)}  # fmt: skip


def _print_check(check: Check) -> None:
    text, colour = _MARKS[check.status]
    typer.echo(f"{typer.style(text, fg=colour)}  {check.name}: {check.found}")
    if check.cure and check.status != "ok":
        typer.echo(f"      {check.cure}")
