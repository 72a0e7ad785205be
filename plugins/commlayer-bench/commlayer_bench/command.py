"""``commlayer bench``: commlayer beside what its users would write without it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from commlayer_bench.records import Results

BUSY = 0.5
"""Above this load average the machine had other things to do."""


class WaitMode(str, Enum):
    """Which of commlayer's wait modes are measured."""

    SAFE = "safe"
    DIRECT = "direct"
    BOTH = "both"


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    workload: Annotated[
        list[str] | None, typer.Option(help="What to measure; may be repeated.", show_default="all")
    ] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="Who takes part; may be repeated.", show_default="all")
    ] = None,
    wait_mode: Annotated[
        WaitMode, typer.Option(help="Wait modes of commlayer that take part.")
    ] = WaitMode.BOTH,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 15,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller cases.")] = False,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the results to this file.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(file_okay=False, help="Draw plots into this folder.")
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Show this file instead of measuring."),
    ] = None,
) -> None:
    """Compare commlayer with other ways to send, in interleaved rounds of the same processes.

    Shown are medians over the rounds, their quartiles, and the ratio of the median
    to that of `plain`: torch.distributed's isend and irecv of shapes known in advance.
    """
    if show is not None:
        results = _read(show)
    else:
        results = _measure(workload, contender, wait_mode, rounds, quick)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_bytes(results.encode() + b"\n")
    _print(results)
    if plots is not None:
        try:
            from commlayer_bench.plots import draw
        except ModuleNotFoundError as error:
            raise typer.BadParameter(
                f"plots need {error.name}: pip install 'commlayer[bench]'", param_hint="--plots"
            ) from None
        for file in draw(results, plots):
            typer.echo(file)


def _measure(
    workload: list[str] | None,
    contender: list[str] | None,
    wait_mode: WaitMode,
    rounds: int,
    quick: bool,
) -> Results:
    from rich.console import Console

    from commlayer_bench.contenders import CONTENDERS, DIRECT, SAFE
    from commlayer_bench.run import run
    from commlayer_bench.workload import Scale
    from commlayer_bench.workloads import WORKLOADS

    hidden = {WaitMode.SAFE: DIRECT, WaitMode.DIRECT: SAFE, WaitMode.BOTH: ""}[wait_mode]
    workloads = _known("--workload", workload, WORKLOADS)
    contenders = _known("--contender", contender, CONTENDERS)
    console = Console(stderr=True)
    with console.status("Starting") as status:
        return run(
            workloads,
            [name for name in contenders if name != hidden],
            rounds=rounds,
            scale=Scale.quick if quick else Scale.full,
            progress=lambda doing: status.update(f"Measuring {doing}"),
        )


def _known(option: str, given: list[str] | None, known: Iterable[str]) -> list[str]:
    known = list(known)
    for name in given or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)
    return given or known


def _read(file: Path) -> Results:
    from commlayer_bench.records import decode

    try:
        return decode(file.read_bytes())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--show") from None


def _print(results: Results) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from commlayer_bench.tables import Cell, tables

    def text(cell: Cell | None) -> Text:
        if cell is None:
            return Text("–", style="dim")
        style = "bold green" if cell.better else "bold yellow"
        return Text.assemble(
            cell.value,
            ("\n" + cell.spread, "dim"),
            (f"\n{cell.ratio}" if cell.ratio else "", style),
        )

    console = Console()
    for table in tables(results):
        shown = Table(
            title=table.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD,
            show_lines=True, pad_edge=False,
        )  # fmt: skip
        shown.add_column("")
        for name in table.columns:
            shown.add_column(name, justify="right")
        for name, cells in table.lines:
            shown.add_row(name, *map(text, cells))
        console.print(shown)
    machine = results.machine
    console.print(
        f"median, quartiles and ratio to plain of {results.rounds} rounds; "
        f"{machine.processor}, {machine.cores} cores",
        style="dim",
    )
    if results.load > BUSY:
        console.print(
            f"busy machine: its load was {results.load:.1f} at the start, the figures say little",
            style="yellow",
        )
    for absent in results.absent:
        console.print(f"left out: {absent.contender}, because {absent.reason}", style="dim")
