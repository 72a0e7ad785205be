"""How the demo looks: a progress line while it works, then the texts and one table."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from commlayer.demo.figures import Figures, Spread


class ProgressLine:
    """A line on the error stream that says what is going on, gone when left.

    Call it as a `commlayer.demo.weights.Progress`.
    """

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bars.add_task("Starting", total=None)
        self._phase = ""

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self._phase = phase
            self._bars.reset(self._task, description=phase, total=total or None)
        self._bars.update(self._task, completed=done)

    def __enter__(self) -> ProgressLine:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()


def show(figures: Figures) -> None:
    """Print the texts, the comparison and the measurements."""
    console = Console(highlight=False)
    for answer in figures.answers:
        console.print(Text(f"> {answer.prompt}", style="bold cyan"))
        console.print(Text(answer.text), end="\n\n")
    console.print(_identical(figures))
    if figures.ratio is not None:
        console.print()
        console.print(_measurements(figures, figures.ratio))
    for line in _notes(figures):
        console.print(Text(line, style="dim"))


def _identical(figures: Figures) -> Text:
    identical = figures.tokens_identical
    return Text.assemble(
        "tokens identical: ",
        ("yes", "bold green") if identical else ("no", "bold red"),
        f" ({figures.tokens} tokens, against the whole model in one process)",
    )


def _measurements(figures: Figures, ratio: Spread) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"median (range) of {figures.rounds} rounds")
    for name in ("overlapped", "blocking", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    modes = [mode for mode in (figures.overlapped, figures.blocking) if mode is not None]
    rates = [_spread(mode.tokens_per_second, ".1f") for mode in modes]
    table.add_row("tokens per second", *rates, _spread(ratio, ".2f"))
    for stage in range(len(figures.layers)):
        shares = [_spread(mode.idle_share[stage], ".0%") for mode in modes]
        table.add_row(f"idle share, stage {stage}", *shares)
    return table


def _notes(figures: Figures) -> Iterator[str]:
    layers = ", ".join(f"{start}-{stop - 1}" for start, stop in figures.layers)
    peaks = ", ".join(f"{nbytes / 1024:.1f}" for nbytes in figures.peak_bytes_in_flight)
    yield (
        f"{figures.model} on {figures.backend}: layers {layers}; "
        f"{figures.in_flight} micro-batches of {figures.micro_batch} requests in flight"
    )
    yield f"peak in flight by stage: {peaks} KiB of sends"
    yield (
        f"single process: {figures.single_process_tokens_per_second:.1f} tokens per second "
        "(one run)"
    )
    if figures.ratio is not None:
        yield (
            "blocking waits for each send, receive and broadcast where it is posted, "
            "so stages take turns"
        )


def _spread(spread: Spread, form: str) -> str:
    low, high = format(spread.low, form), format(spread.high, form)
    return f"{format(spread.median, form)} ({low} to {high})"
