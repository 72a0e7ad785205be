"""Values that the ranks of a group give each other, matched by key."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from commlayer.errors import ConfigError
from commlayer.handle import Handle
from commlayer.lanes.posting import Posting
from commlayer.progress.deadline import Deadline
from commlayer.wire.frame import Kind, protocol_error
from commlayer.wire.tags import SLICES
from commlayer.wire.values import register

if TYPE_CHECKING:
    from commlayer.progress.runtime import Runtime


@dataclass(frozen=True)
class Missing:
    """Sent in place of a contribution by a rank that has none."""

    cause: str


register(Missing, "commlayer.Missing")


@runtime_checkable
class Group(Protocol):
    """What is needed of the communicator of the group."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def _exchange(self) -> Exchange: ...


def checked_group(group: Any, call: str) -> Group:
    """`group`; raises `ConfigError` unless it is a communicator."""
    if isinstance(group, Group):
        return group
    raise ConfigError(
        call,
        f"all_gather_group is a {type(group).__qualname__}",
        "Pass the communicator of the group: connect(group=...)",
    )


class Exchange:
    """One value from each rank of a group to each other one, matched by key in any order.

    Messages of a peer are taken in when somebody waits, and kept for whom they
    are.  They travel on lanes that nothing else uses.
    """

    def __init__(self, peers: Sequence[int], runtime: Runtime, posting: Posting) -> None:
        self.runtime = runtime
        self._peers = peers
        self._posting = posting
        # Guards the tables.  No operation is posted or waited for under it but the next receive
        # of a peer, which must be posted once.
        self._lock = runtime.lock()
        self._posted: dict[int, Handle] = {}
        self._arrived: dict[tuple[int, Any], Handle] = {}
        self._unwanted: set[tuple[int, Any]] = set()
        self._counts: defaultdict[tuple[Any, ...], int] = defaultdict(int)
        self._lines: defaultdict[tuple[Any, ...], deque[Any]] = defaultdict(deque)

    def key(self, kind: tuple[Any, ...]) -> tuple[Any, ...]:
        """The next key of its kind: every rank asks for them in the same order."""
        with self._lock:
            number = self._counts[kind]
            self._counts[kind] += 1
        return (*kind, number)

    def line(self, kind: tuple[Any, ...]) -> deque[Any]:
        """The handles of one kind and sender that have not posted their parts, oldest first."""
        return self._lines[kind]

    def leave(self, line: deque[Any], handle: object) -> None:
        """Take `handle`, which has posted, from the front of `line` if it is still there."""
        with self._lock:
            if line and line[0] is handle:
                line.popleft()

    def post(self, key: tuple[Any, ...], value: Any) -> None:
        """Send `value` to every other rank."""
        for peer in self._peers:
            self._posting.send("send slices", Kind.OBJECT, (key, value), peer, SLICES)

    def wait(
        self,
        key: tuple[Any, ...],
        timeout: float | None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return once every other rank's value is here, or `over`.

        Raises `CommTimeout`, which loses nothing, and whatever receiving raises.
        """
        deadline = Deadline(self.runtime.now, timeout)
        for peer in self._peers:
            while not self._has(peer, key) and not over():
                self._take_in(peer, deadline.remaining())

    def ready(self, key: tuple[Any, ...]) -> bool:
        """Whether `wait` would return at once.  Never blocks."""
        for peer in self._peers:
            while not self._has(peer, key):
                if not self._next(peer).is_completed():
                    return False
                self._take_in(peer, 0)
        return True

    def peek(self, key: tuple[Any, ...]) -> dict[int, Any]:
        """Every other rank's value, once here, ordered before the current stream."""
        return {peer: self._arrived[peer, key].result(0)[1] for peer in self._peers}

    def listen(self) -> None:
        """Have the next message of every other rank taken in, so that its send completes."""
        for peer in self._peers:
            self._next(peer)

    def forget(self, key: tuple[Any, ...]) -> None:
        """Discard `key`: what came under it, and what is still to come."""
        with self._lock:
            for peer in self._peers:
                if self._arrived.pop((peer, key), None) is None:
                    self._unwanted.add((peer, key))

    def _has(self, peer: int, key: tuple[Any, ...]) -> bool:
        with self._lock:
            return (peer, key) in self._arrived

    def _next(self, peer: int) -> Handle:
        with self._lock:
            handle = self._posted.get(peer)
            if handle is None:
                handle = self._posted[peer] = self._posting.receive(
                    "receive slices", Kind.OBJECT, peer, SLICES
                )
            return handle

    def _take_in(self, peer: int, timeout: float | None) -> None:
        handle = self._next(peer)
        message = handle.result(timeout)
        with self._lock:
            if self._posted.get(peer) is not handle:
                return
            del self._posted[peer]
            try:
                key, _ = message
                if (peer, key) in self._unwanted:
                    self._unwanted.remove((peer, key))
                else:
                    self._arrived[peer, key] = handle
            except (TypeError, ValueError) as error:
                raise protocol_error(
                    f"exchange with rank {peer} of all_gather_group", "the message has no key"
                ) from error
