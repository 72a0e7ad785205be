"""The one error type of the library, and its kinds."""

from __future__ import annotations

from enum import Enum


class ErrorKind(str, Enum):
    """What went wrong, in the order in which an operation can meet it."""

    CONFIG = "config"
    """A setting, an argument or a combination of choices is not valid."""
    PLUGIN = "plugin"
    """A backend is missing, broken, ambiguous or written for another version."""
    UNSUPPORTED = "unsupported"
    """The request is well formed but this backend or version cannot do it."""
    CLOSED = "closed"
    """The communicator, or the peer's, is closed."""
    FULL = "full"
    """The bound on operations or bytes in flight is reached."""
    TIMEOUT = "timeout"
    """A limit expired; the operation goes on and may be waited again."""
    PEER_LOST = "peer_lost"
    """The peer is dead or unreachable."""
    PROTOCOL = "protocol"
    """A message is malformed, out of order, or not what the receiver asked for."""
    LIFETIME = "lifetime"
    """A buffer was overwritten or freed while an operation still used it."""


class Subject(str):
    """The words for an operation, with what they are made of."""

    __slots__ = ("call", "channel", "nbytes", "peer", "sequence", "tag")

    call: str
    peer: int
    channel: str
    tag: str
    sequence: int
    nbytes: int

    @classmethod
    def of(
        cls, text: str, *, call: str, peer: int, channel: str, tag: str, sequence: int, nbytes: int
    ) -> Subject:
        """`text` that describes the operation of these values; -1 and 0 where unknown."""
        subject = cls(text)
        subject.call = call
        subject.peer = peer
        subject.channel = channel
        subject.tag = tag
        subject.sequence = sequence
        subject.nbytes = nbytes
        return subject


def connection_with(rank: int, process: str = "") -> Subject:
    """The words for everything that goes between this rank and `rank`, which is `process`."""
    text = f"connection with rank {rank}" + (f" ({process})" if process else "")
    return Subject.of(text, call="connection", peer=rank, channel="", tag="", sequence=-1, nbytes=0)


class CommError(RuntimeError):
    """An error that names the operation, the cause and the cure.

    `operation` describes what was attempted (kind, peer, channel, sequence
    number, size) and is kept as text, `cause` what happened and `cure` what to do about it.  All
    three are plain text and part of ``str(error)``.

    `call` (such as ``"irecv"``), `peer`, `channel`, `tag`, `sequence` and `nbytes` are
    those of the operation, and ``None`` where an error is about no single one or
    where it is not known yet.  `anchor` is where its kind is explained.
    """

    def __init__(self, kind: ErrorKind, operation: object, cause: str, cure: str) -> None:
        self.kind = kind
        self.operation = operation if isinstance(operation, str) else str(operation)
        self.cause = cause
        self.cure = cure
        super().__init__(f"{operation}: {cause}. {cure}" if cure else f"{operation}: {cause}.")
        self.__notes__ = [f"see {self.anchor}"]

    @property
    def anchor(self) -> str:
        """The place in the documentation that explains errors of this kind."""
        return f"docs/errors.md#{self.kind.value}"

    @property
    def call(self) -> str | None:
        """The call, such as ``"irecv"``; this and the others are ``None`` where not known."""
        return self.operation.call if isinstance(self.operation, Subject) else None

    @property
    def peer(self) -> int | None:
        """The other rank."""
        return self.operation.peer if isinstance(self.operation, Subject) else None

    @property
    def channel(self) -> str | None:
        """The channel."""
        return (self.operation.channel or None) if isinstance(self.operation, Subject) else None

    @property
    def tag(self) -> str | None:
        """The tag, or the name of one of the library's own lanes."""
        return (self.operation.tag or None) if isinstance(self.operation, Subject) else None

    @property
    def sequence(self) -> int | None:
        """The number of the message in its lane, from 0."""
        if not isinstance(self.operation, Subject) or self.operation.sequence < 0:
            return None
        return self.operation.sequence

    @property
    def nbytes(self) -> int | None:
        """The size of the operation in bytes."""
        return (self.operation.nbytes or None) if isinstance(self.operation, Subject) else None

    def again(self) -> CommError:
        """A fresh error of the same content, so that each raise has its own traceback."""
        twin = type(self).__new__(type(self))
        CommError.__init__(twin, self.kind, self.operation, self.cause, self.cure)
        twin.__cause__ = self.__cause__
        return twin

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.kind, self.operation, self.cause, self.cure))


class CommTimeout(CommError, TimeoutError):
    """A limit expired.  Nothing has changed: the operation goes on and can be waited again."""

    def __new__(cls, *arguments: object) -> CommTimeout:
        return TimeoutError.__new__(cls)  # the one that lays out both bases

    def __init__(self, operation: str, cause: str, cure: str) -> None:
        super().__init__(ErrorKind.TIMEOUT, operation, cause, cure)


def _rebuild(
    cls: type[CommError], kind: ErrorKind, operation: str, cause: str, cure: str
) -> CommError:
    error = cls.__new__(cls)
    CommError.__init__(error, kind, operation, cause, cure)
    return error
