"""The contenders by name.  Each module imports what it needs only when it connects."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from commlayer_bench.contender import Contender
from commlayer_bench.contenders import commlayer, common, mpi, object_list, plain, vllm

CONTENDERS: Mapping[str, Callable[[str], Contender]] = {
    "plain": plain.connect,
    "common": common.connect,
    "object_list": object_list.connect,
    "mpi pickle": mpi.connect_pickle,
    "mpi buffer": mpi.connect_buffer,
    "vllm": vllm.connect,
    **dict.fromkeys(commlayer.MODES, commlayer.connect),
}
"""Connect a contender by name, in every rank of a ``torch.distributed`` job.

Raises `Unavailable` on all ranks alike.
"""

SAFE, DIRECT = commlayer.MODES

MPI = ("mpi pickle", "mpi buffer")

FLOOR = "plain"
"""What the others are compared with: no contender that knows less can be expected to be faster."""
