"""Memory that tells who used it after it was free.

`Arena` is one rank's device memory under a stream-aware caching allocator: a
block that is freed goes back to the pool of the stream it was allocated on and
is handed out again at once, last in first out, because later work of that stream
is ordered after earlier work.  Other streams are waited for only if the tensor
was recorded on them.  Freed memory is poisoned in the order of its stream.

`Buffer` is a transport's or a kernel's access to a tensor: it keeps the tensor
alive or not, and reads and writes through the address as hardware would.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.world import World, memory_bit, program_bit, site

if TYPE_CHECKING:
    from commlayer_testkit.sim.rank import Rank
    from commlayer_testkit.sim.streams import SimStream

POISON = 0xDB
GRANULE = 64


class Block:
    """One allocation's place.

    `generation` counts how often it was handed out; `dead` is the last generation
    whose free the stream has passed.  `written` is the issue number of the last
    write; `incoming` describes a receive that has yet to be delivered here.
    """

    __slots__ = ("allocated_at", "dead", "freed_at", "generation", "incoming", "nbytes", "offset",
                 "recorded", "stream", "written", "written_at")  # fmt: skip

    def __init__(self, offset: int, nbytes: int, stream: SimStream) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.stream = stream
        self.generation = 0
        self.dead = 0
        self.incoming: tuple[int, str] | None = None
        self.recorded: set[SimStream] = set()
        self.allocated_at = self.freed_at = self.written_at = ""
        self.written = 0


class Arena:
    """One rank's device memory: `capacity` bytes, of tensors on torch's CPU device."""

    def __init__(self, world: World, rank: Rank, capacity: int = 1 << 16) -> None:
        self.world = world
        self.rank = rank
        self._slab = bytearray(capacity)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._slab))
        self._top = 0
        self._blocks: list[Block] = []
        self._pool: defaultdict[tuple[SimStream, int], list[Block]] = defaultdict(list)
        self._refs: dict[int, weakref.ref[Any]] = {}
        self.in_use = 0
        """Bytes handed out, or freed and still held back for a recorded stream."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Allocate on the current stream.  The contents are whatever was there."""
        stream = self.rank.device.current_stream()
        count = 1
        for extent in shape:
            count *= extent
        nbytes = max(count * dtype.itemsize, 1)
        size = -(-nbytes // GRANULE) * GRANULE
        pool = self._pool[stream, size]
        block = pool.pop() if pool else self._extend(size, stream)
        block.generation += 1
        block.allocated_at = site() if self.world.explain else ""
        block.written = 0
        self.in_use += size
        place = (ctypes.c_uint8 * nbytes).from_buffer(self._slab, block.offset)
        generation = block.generation
        self._refs[block.offset] = weakref.ref(place, lambda _: self._free(block, generation))
        return torch.frombuffer(place, dtype=torch.uint8).view(dtype)[:count].view(shape)

    def full(self, value: int, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Allocate and fill by a kernel on the current stream."""
        tensor = self.empty(*shape, dtype=dtype)
        self.rank.device.launch("fill", lambda out: out.fill_(value), writes=[tensor])
        return tensor

    def find(self, tensor: torch.Tensor) -> Block | None:
        """The block that `tensor` lies in, if it is this arena's."""
        offset = tensor.untyped_storage().data_ptr() - self._base
        if not 0 <= offset < self._top:
            return None
        return self._blocks[bisect_right(self._blocks, offset, key=lambda b: b.offset) - 1]

    def record_stream(self, tensor: torch.Tensor, stream: SimStream) -> None:
        """Hold the block back after its free until `stream` has done what it has been given."""
        block = self.find(tensor)
        if block is not None and stream is not block.stream:
            block.recorded.add(stream)

    def _extend(self, size: int, stream: SimStream) -> Block:
        if self._top + size > len(self._slab):
            raise MemoryError(f"{self.rank.name}: arena of {len(self._slab)} bytes is full")
        block = Block(self._top, size, stream)
        self._top += size
        self._blocks.append(block)
        return block

    def _free(self, block: Block, generation: int) -> None:
        if self.world.closing or block.generation != generation:
            return
        block.freed_at = site() if self.world.explain else ""
        self.world.note(self.rank.name, "free", f"block at {block.offset}")
        recorded, block.recorded = block.recorded, set()
        if not recorded:
            self._release(block)
            return
        pending = len(recorded)

        def one_done() -> None:
            nonlocal pending
            pending -= 1
            if pending == 0:
                self._release(block)

        for stream in recorded:
            stream.then(one_done)

    def _release(self, block: Block) -> None:
        """Make the block available; it is dead and poisoned where its stream gets to this point."""
        self.in_use -= block.nbytes
        rank = self.rank.index
        self.world.touch(writes=program_bit(rank) | memory_bit(rank))
        address, generation = self._base + block.offset, block.generation

        def poison() -> None:
            block.dead = generation
            ctypes.memset(address, POISON, block.nbytes)

        block.stream.then(poison)
        self._pool[block.stream, block.nbytes].append(block)

    def close(self) -> None:
        self._refs.clear()
        self._pool.clear()


class Buffer:
    """A tensor's bytes, as the one who operates on them holds them.

    `hold` keeps the tensor alive.  Otherwise the access is by address: the
    tensor may die, and touching it then is a failure.
    """

    __slots__ = ("_address", "_freed_at", "_generation", "_storage", "_tensor", "_what", "_world",
                 "block", "issued", "nbytes", "storage_address")  # fmt: skip

    def __init__(
        self,
        world: World,
        tensor: torch.Tensor,
        what: Callable[[], str],
        *,
        hold: bool,
        arena: Arena | None,
    ) -> None:
        self._world = world
        self._what = what
        self._freed_at = ""
        self.nbytes = tensor.numel() * tensor.element_size()
        self._address = tensor.data_ptr()
        self._tensor = tensor if hold else None
        self.block = arena.find(tensor) if arena is not None else None
        self._generation = self.block.generation if self.block else 0
        self._storage = None if hold or self.block else self._watch(tensor)
        self.storage_address = tensor.untyped_storage().data_ptr()
        self.issued = world.issue()

    def _watch(self, tensor: torch.Tensor) -> weakref.ref[Any]:
        if not self._world.explain:
            return weakref.ref(tensor.untyped_storage())

        def freed(_: object) -> None:
            self._freed_at = site()

        return weakref.ref(tensor.untyped_storage(), freed)

    def alive(self) -> bool:
        """Whether the tensor has not been freed."""
        if self.block is not None:
            return self.block.dead < self._generation
        return self._storage is None or self._storage() is not None

    def touch(self, verb: str, by: str) -> bool:
        """Fail unless the tensor is alive."""
        if self.alive():
            return True
        lines = []
        if (block := self.block) is not None:
            lines.append(f"freed at {block.freed_at or 'an unrecorded line'}")
            if block.generation != self._generation:
                lines.append(f"handed out again at {block.allocated_at or 'an unrecorded line'}")
        else:
            where = f" at {self._freed_at}" if self._freed_at else ""
            lines.append(f"its last reference was dropped{where}")
        self._world.fail(
            FailureKind.USE_AFTER_FREE,
            f"{by} {verb} memory that had been freed: {self._what()}",
            tuple(lines),
        )
        return False

    def read(self, start: int, end: int, by: str) -> bytes:
        if not self.touch("reads", by):
            return bytes(end - start)
        return ctypes.string_at(self._address + start, end - start)

    def write(self, data: bytes, by: str) -> None:
        if self.touch("writes", by):
            ctypes.memmove(self._address, data, len(data))

    def release(self) -> None:
        """The one who operated on it is done and keeps it no longer."""
        if self._tensor is not None and self.block is None:
            self._storage = self._watch(self._tensor)
        self._tensor = None

    def peek(self) -> bytes:
        """The bytes now; only while the caller still holds the tensor."""
        return ctypes.string_at(self._address, self.nbytes)
