"""How the demo looks: a progress line while it works, then the texts and one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from commlayer_demo.figures import Figures, Spread

BUSY = 0.9
"""Below this share of a core for computing, the printed ratio says more about the machine."""


class ProgressLine:
    """A line on the error stream that says what is going on, gone when left.

    Call it as a `commlayer_demo.weights.Progress`.
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
    table.add_column(f"{figures.rounds} rounds", no_wrap=True)
    for name in ("overlapped", "blocking", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    modes = [mode for mode in (figures.overlapped, figures.blocking) if mode is not None]
    rates = [_spread(mode.tokens_per_second, _rate) for mode in modes]
    table.add_row("tokens per second", *rates, _spread(ratio, _ratio))
    for rank in range(len(figures.ranks)):
        shares = [_spread(mode.idle_share[rank], _share) for mode in modes]
        table.add_row(f"idle share, {_place(figures)} {rank}", *shares)
    return table


def _notes(figures: Figures) -> Iterator[str]:
    place = _place(figures)
    parts = [f"{start}–{stop - 1}" for start, stop in figures.layers]
    layers = ", ".join(" and ".join(parts[stage] for stage in rank) for rank in figures.ranks)
    peaks = ", ".join(f"{nbytes / 1024:.1f}" for nbytes in figures.peak_bytes_in_flight)
    if figures.ratio is not None:
        yield "median (range); blocking waits for each operation where it is posted"
    if figures.overlapped is not None:
        core = min(share.median for share in figures.overlapped.core_share)
        if core < BUSY:
            yield f"busy machine: a {place} got {_share(core)} of a core, the ratio says little"
    yield f"{figures.model} on {figures.backend}, layers by {place}: {layers}"
    yield f"in flight: up to {figures.in_flight} micro-batches of {figures.micro_batch}"
    yield f"peak of sends in flight by {place}: {peaks} KiB"
    yield f"token broadcasts: {figures.broadcasts} in {figures.steps} steps"
    single = _rate(figures.single_process_tokens_per_second)
    yield f"single process: {single} tokens per second (one run)"


def _place(figures: Figures) -> str:
    """What a process is called: its stage, if it has only one."""
    return "stage" if all(len(stages) == 1 for stages in figures.ranks) else "rank"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _spread(spread: Spread, form: Callable[[float], str]) -> str:
    return f"{form(spread.median)} ({form(spread.low)}–{form(spread.high)})"
