"""What launchers say in the environment: rank, size, address of the store, attempt."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, NamedTuple

from commlayer.errors import CommError, ErrorKind

if TYPE_CHECKING:
    from commlayer.registry import Registry

_TASKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
"""Variables in which other launchers say how many processes they have started."""


class Generation(NamedTuple):
    """Which attempt of a group this is.  Two are compared if either is `strict`."""

    number: int = 0
    strict: bool = False

    def differs(self, other: Generation) -> bool:
        return self.number != other.number and (self.strict or other.strict)


def launched_generation() -> Generation:
    """The restarts that ``torchrun`` has counted.

    Each of its agents counts those that its own processes caused (``_remaining_restarts`` of
    torch's elastic agent), so that hosts of one attempt may differ; with one agent all are equal.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if not count.isdecimal():
        return Generation()
    return Generation(int(count), strict=os.environ.get("GROUP_WORLD_SIZE", "1") == "1")


def explicit_generation(number: int) -> Generation:
    """The generation that the caller of `connect` gives."""
    return Generation(checked_number("generation", number), strict=True)


def checked_number(what: str, number: int) -> int:
    """`number` as a plain int, of whatever integer type; raises unless it is 0 or more."""
    try:
        value = operator.index(number)
    except TypeError:
        value = -1
    if value < 0 or isinstance(number, bool):
        raise refusal(f"{what} = {number!r} is not an integer from 0 on", "Pass an int")
    return value


def run_id() -> str:
    """The identity that the launcher gave this job; empty where it has none."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def launcher_holds_store() -> bool:
    """Whether ``torchrun`` serves the store itself, so that rank 0 need not."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def tasks_of_other_launcher() -> str:
    """The variable, with its value, by which another launcher says that this is one of several."""
    for variable in _TASKS:
        count = os.environ.get(variable, "")
        if count.isdecimal() and int(count) > 1:
            return f"{variable} = {count}"
    return ""


def check_launcher(registry: Registry, chosen: str) -> None:
    """Raise unless this process may take itself for what the environment of ``torchrun`` says.

    One of several processes of another launcher is no world of one.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    for entry in registry.survey():
        if entry.loaded is None:
            continue
        backend = entry.loaded.backend
        if backend.launched():
            if backend.name == chosen:
                return
            raise refusal(
                f"the launcher of backend {backend.name!r} has started this process as one of "
                f"several, and backend {chosen!r} does not find the others by it",
                f"Set backend = {backend.name!r}, or start the ranks with torchrun",
            )
    tasks = tasks_of_other_launcher()
    if tasks:
        raise refusal(
            f"a launcher has started this process as one of several ({tasks}), and backend "
            f"{chosen!r} does not find the others by it",
            "Start the ranks with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
            "(WORLD_SIZE = 1 and RANK = 0 for a process that is alone)",
        )


def number(variable: str) -> int:
    """The number that `variable` of the environment holds."""
    text = os.environ[variable]
    try:
        return int(text)
    except ValueError:
        raise refusal(f"{variable} = {text!r} is not a number", "Correct it") from None


def refusal(cause: str, cure: str) -> CommError:
    """The error of a `connect` that cannot begin."""
    return CommError(ErrorKind.CONFIG, "connect", cause, cure)
