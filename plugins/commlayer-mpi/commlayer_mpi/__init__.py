"""The ``mpi`` backend: an MPI library through mpi4py, on host memory.

The opposite of torch's groups in nearly every fact: the library's own query is
truthful, nothing moves unless somebody calls it, and a request that is dropped
lets the library use freed memory.  mpi4py is imported, and MPI initialised, only
when a communicator is connected.

Facts were measured on MPICH 5.0.2 (``ch4:ucx``) and mpi4py 4.1.2 with two
processes, over shared memory and over loopback.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from commlayer.backend import Backend, Transport, Viability, World
from commlayer.errors import CommError, ErrorKind
from commlayer.hooks import hookimpl
from commlayer.semantics import (
    Completion,
    DroppedWork,
    NativeTimeout,
    OperationSemantics,
    Order,
    PeerLoss,
    Poll,
    PostMayBlock,
    Progress,
    Semantics,
    SizeMismatch,
    SourceLifetime,
    Threads,
    WaitBlocks,
)

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
"""Where MPICH's, Open MPI's and Intel MPI's launchers say how many ranks there are."""
_INSTALL = "pip install 'commlayer-mpi[mpich]'"
_CHOICE_OF_LIBRARY = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _is_several(text: str) -> bool:
    return text.isdecimal() and int(text) > 1


def _eager_bytes() -> int:
    """Below all that was measured on the library that mpi4py takes here; 0 on any other."""
    probed = _version("mpich").startswith("5.0.")
    chosen = any(variable in os.environ for variable in _CHOICE_OF_LIBRARY)
    return 4096 if probed and not chosen else 0


SEMANTICS = Semantics(
    p2p=OperationSemantics(
        poll=Poll.EXACT,
        wait_blocks=WaitBlocks.HOST,
        wait_repeatable=True,
        timeout=NativeTimeout.IGNORED,
        dropped_work=DroppedWork.UNSAFE,
        eager_bytes=_eager_bytes(),
        post_may_block=PostMayBlock.NEVER,
        order=Order.PER_TAG,
        max_outstanding_per_pair=0,
        completion=Completion.LOCAL,
        size_mismatch=SizeMismatch.ERROR,
        source_lifetime=SourceLifetime.REFERENCE,
        peer_loss=PeerLoss.SILENT,
        errors_polled=True,
    ),
    progress=Progress.ONLY_IN_CALLS,
    threads=Threads.SERIALIZED,
    tags=True,
    devices=("cpu",),
)

_MEASURED = "measured, MPICH 5.0.2 and mpi4py 4.1.2, two processes"
_STANDARD = "MPI standard"
SOURCES = {
    "p2p.poll": f"{_STANDARD}, MPI_Test; {_MEASURED}: true without a wait, never early",
    "p2p.wait_repeatable": f"{_STANDARD}: a completed request is null, waiting for it returns",
    "p2p.timeout": f"{_STANDARD}: MPI_Wait has no limit of time",
    "p2p.dropped_work": f"{_MEASURED}: memory of a pending send is read after it was freed",
    "p2p.eager_bytes": (
        f"{_MEASURED}: up to 8112 bytes through shared memory, 5028 through UCX's, 259131 "
        "through TCP, while the peer makes MPI calls; without, for the first 64 messages.  "
        "Not claimed of other libraries"
    ),
    "p2p.post_may_block": f"{_STANDARD}: MPI_Isend and MPI_Irecv are local",
    "p2p.order": f"{_STANDARD}: messages of one communicator, pair and tag do not overtake",
    "p2p.completion": f"{_STANDARD}, MPI_Isend: the source may be reused, no more is said",
    "p2p.size_mismatch": (
        f"{_MEASURED}: a longer message raises MPI_ERR_TRUNCATE and the process lives; "
        "a shorter one fills the first bytes"
    ),
    "p2p.source_lifetime": f"{_STANDARD}: the buffer is the caller's until completion",
    "p2p.peer_loss": f"{_MEASURED}: mpiexec ends the whole job; nothing is raised before that",
    "p2p.errors_polled": f"{_MEASURED}: MPI_Test raises",
    "progress": f"{_STANDARD} allows it; {_MEASURED}: 1 MiB moves only inside calls",
    "threads": (
        "MPI_THREAD_MULTIPLE is required of the library; one request must not be tested "
        f"by two threads at once ({_STANDARD})"
    ),
}


class MpiBackend(Backend):
    """``mpi``.  No options.  Ranks are those of ``mpiexec``, or a torch group among them."""

    name: ClassVar[str] = "mpi"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    semantics: ClassVar[Semantics] = SEMANTICS
    sources: ClassVar[Mapping[str, str]] = SOURCES

    def viability(self) -> Viability:
        if importlib.util.find_spec("mpi4py") is None:
            return Viability(False, "mpi4py is not installed", _INSTALL)
        try:
            found = importlib.util.find_spec("mpi4py.MPI")
        except RuntimeError as error:
            return Viability(False, str(error).partition("\n")[0], _INSTALL)
        if found is None:
            return Viability(False, "mpi4py has no module for this MPI library", _INSTALL)
        return Viability(True, f"mpi4py {_version('mpi4py')} finds an MPI library")

    def versions(self) -> Mapping[str, str]:
        found = {name: _version(name) for name in ("mpi4py", "mpich")}
        return {name: text for name, text in found.items() if text}

    def job(self, connect_timeout: float) -> World | None:
        from commlayer_mpi.job import launched

        return launched(connect_timeout)

    def launched(self) -> bool:
        return any(_is_several(os.environ.get(variable, "")) for variable in _SIZES)

    def launcher(self, size: int) -> Sequence[str]:
        beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
        found = beside or shutil.which("mpiexec")
        if found is None:
            raise CommError(
                ErrorKind.PLUGIN, "launcher of backend 'mpi'", "there is no mpiexec", _INSTALL
            )
        return [found, "-n", str(size)]

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        if options:
            raise CommError(
                ErrorKind.CONFIG,
                "options of backend 'mpi'",
                f"unknown {', '.join(sorted(options))}",
                "There are none; the MPI library has its own environment variables",
            )
        from commlayer_mpi.transport import MpiTransport

        return MpiTransport(world)


@hookimpl
def commlayer_backend() -> Backend:
    return MpiBackend()
