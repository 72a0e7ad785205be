"""Which progress engine the declared facts allow."""

from __future__ import annotations

from commlayer.errors import CommError, ErrorKind
from commlayer.progress.direct import DirectProgress
from commlayer.progress.engine import ProgressEngine
from commlayer.progress.polling import PollingProgress
from commlayer.progress.runtime import Runtime
from commlayer.progress.waiter import WaiterProgress
from commlayer.semantics import Poll, PostMayBlock, Progress, Semantics, Threads, WaitBlocks


def choose_progress(
    preference: str, semantics: Semantics, runtime: Runtime, backend: str, *, direct: bool = False
) -> ProgressEngine:
    """The driver that the facts allow; `preference` is ``auto`` or the name of one.

    With `direct` an untimed wait moves its lane itself, which polling does anyway.

    Raises `CommError` (CONFIG) naming the fact that rules out the preferred
    driver, or (UNSUPPORTED) when the facts rule out both.
    """
    obstacles = {"waiter": _waiter_obstacle(semantics), "polling": _polling_obstacle(semantics)}
    if preference != "auto":
        if obstacles[preference]:
            raise CommError(
                ErrorKind.CONFIG,
                f"progress {preference!r} on backend {backend!r}",
                f"unsound: {obstacles[preference]}",
                "Leave progress at 'auto'",
            )
        return _make(preference, semantics, runtime, direct)
    for name, obstacle in obstacles.items():
        if not obstacle:
            return _make(name, semantics, runtime, direct)
    raise CommError(
        ErrorKind.UNSUPPORTED,
        f"progress on backend {backend!r}",
        f"no way to notice completion is sound: {obstacles['waiter']}; {obstacles['polling']}",
        "Declare (and prove) a stronger fact in the plugin",
    )


def _make(name: str, semantics: Semantics, runtime: Runtime, direct: bool) -> ProgressEngine:
    if name == "polling":
        return PollingProgress(runtime, background=semantics.threads is not Threads.FUNNELED)
    return DirectProgress(runtime) if direct else WaiterProgress(runtime)


def _waiter_obstacle(semantics: Semantics) -> str:
    if semantics.p2p.wait_blocks is not WaitBlocks.HOST:
        return "waiters need wait_blocks = HOST"
    if semantics.threads is not Threads.MULTIPLE:
        return f"waiters need threads = MULTIPLE, declared is {semantics.threads.name}"
    if semantics.progress is not Progress.AUTONOMOUS:
        return f"waiters need progress = AUTONOMOUS, declared is {semantics.progress.name}"
    return ""


def _polling_obstacle(semantics: Semantics) -> str:
    if semantics.p2p.poll is not Poll.EXACT:
        return f"polling needs poll = EXACT, declared is {semantics.p2p.poll.name}"
    if semantics.p2p.post_may_block is not PostMayBlock.NEVER:
        return (
            f"polling needs post_may_block = NEVER, declared is {semantics.p2p.post_may_block.name}"
        )
    return ""
