"""The errors of the library: one base class, one class for each kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, TypeAlias


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
    CANCELLED = "cancelled"
    """The receive was withdrawn before a message was matched to it."""
    PEER_LOST = "peer_lost"
    """The peer is dead or unreachable."""
    DEVICE = "device"
    """This rank's own device, or its runtime, failed."""
    PROTOCOL = "protocol"
    """A message is malformed, out of order, or not what the receiver asked for."""
    LIFETIME = "lifetime"
    """A buffer was overwritten or freed while an operation still used it."""


@dataclass(frozen=True)
class OperationRef:
    """The operation that an error is about, as values and (``str``) in words.

    `peer` and `sequence` are -1, `channel` and `tag` empty, and `nbytes` 0 where unknown.
    `connection` is its name, and empty for the default one: ranks are local to it.
    """

    text: str
    call: str
    peer: int = -1
    channel: str = ""
    tag: str = ""
    sequence: int = -1
    nbytes: int = 0
    connection: str = ""

    def __str__(self) -> str:
        return self.text


class Described(Protocol):
    """What can say of itself which operation it is, once an error needs it."""

    def describe(self) -> OperationRef: ...


About: TypeAlias = str | OperationRef | Described
"""What an error is about: an operation, or words where it is about no single one."""


_CONNECTION = "connection"
_LINE = 400
"""Characters of the text of an error that other ranks are told."""


def connection_with(rank: int, process: str = "") -> OperationRef:
    """All traffic between this rank and `rank`, which is `process`."""
    text = f"connection with rank {rank}" + (f" ({process})" if process else "")
    return OperationRef(text, _CONNECTION, rank)


def in_a_line(error: BaseException | str) -> str:
    """An error in words, fit to be sent to other ranks and printed there."""
    if isinstance(error, str):
        text = error
    else:
        said = str(error).strip()
        text = type(error).__name__ + (f": {said}" if said else "")
    line = text.strip().partition("\n")[0][:_LINE]
    return "".join(char if char.isprintable() else "?" for char in line) or "no reason given"


def peer_lost(rank: int, process: str, why: str, said: str = "") -> PeerLost:
    """The error of a peer that is gone.

    `process` is its pid and host, and `said` what others, such as the transport, have to
    say about it: it comes last, because it is not written for who reads the error.
    """
    who = f" ({process})" if process else ""
    cure = f"Rank {rank} has died or cannot be reached; restart the group"
    cure += f" (the transport reports: {said})" if said else ""
    return PeerLost(connection_with(rank), f"rank {rank}{who} is lost: {why}", cure)


def peer_left(rank: int, process: str, why: str) -> PeerLost:
    """The error of a peer that has left because of an error of its own, `why`."""
    who = f" ({process})" if process else ""
    cure = f"See the log of rank {rank}, and restart the group"
    return PeerLost(connection_with(rank), f"rank {rank} left: {why}{who}", cure)


class _ByKind(type):
    """Makes ``CommError(kind, ...)`` an error of the class of that kind."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if cls is CommError:
            kind, *arguments_left = arguments
            return _CLASSES[kind](*arguments_left, **named)
        return super().__call__(*arguments, **named)


class CommError(RuntimeError, metaclass=_ByKind):
    """An error that names the operation, the cause and the cure.

    Each kind has a class of its own to catch: ``CommError(kind, ...)`` makes an
    error of that class.  `operation` says what was attempted (call, peer, channel,
    sequence number, size), `cause` what happened and `cure` what to do about it;
    all three are plain text and part of ``str(error)``.  `about` is the operation
    as values, or ``None`` where an error is about no single one.  `anchor` is
    where the kind is explained.

    Errors can be pickled and copied.
    """

    def __init__(self, kind: ErrorKind, about: About, cause: str, cure: str) -> None:
        about = about if isinstance(about, (str, OperationRef)) else about.describe()
        self.kind = kind
        self.operation = str(about)
        self.about = about if isinstance(about, OperationRef) else None
        self.cause = cause
        self.cure = cure
        super().__init__(f"{about}: {cause}. {cure}" if cure else f"{about}: {cause}.")
        self.__notes__ = [f"see {self.anchor}"]

    @property
    def anchor(self) -> str:
        """The place in the documentation that explains errors of this kind."""
        return f"docs/errors.md#{self.kind.value}"

    @property
    def call(self) -> str | None:
        """The call, such as ``"irecv"``; this and the others are ``None`` where not known."""
        return self.about.call if self.about else None

    @property
    def peer(self) -> int | None:
        """The other rank."""
        return self.about.peer if self.about and self.about.peer >= 0 else None

    @property
    def channel(self) -> str | None:
        """The channel."""
        return (self.about.channel or None) if self.about else None

    @property
    def tag(self) -> str | None:
        """The tag, or the name of one of the library's own lanes."""
        return (self.about.tag or None) if self.about else None

    @property
    def sequence(self) -> int | None:
        """The number of the message in its lane, from 0."""
        return self.about.sequence if self.about and self.about.sequence >= 0 else None

    @property
    def nbytes(self) -> int | None:
        """The size of the operation in bytes."""
        return (self.about.nbytes or None) if self.about else None

    def again(self, about: About | None = None) -> CommError:
        """A fresh error of the same content, so that each raise has its own traceback.

        It is about `about`, where that is given.
        """
        cls, kind, own, cause, cure = self._parts()
        twin = _rebuild(cls, kind, about or own, cause, cure)
        twin.__cause__ = self.__cause__
        return twin

    def concerning(self, operation: Described) -> CommError:
        """A fresh error of the same content, as that of `operation` if it is about all traffic
        with a peer.

        `peer` stays: it is the rank that is to blame, whichever the operation is with.
        """
        if self.about is None or self.about.call != _CONNECTION:
            return self.again()
        return self.again(replace(operation.describe(), peer=self.about.peer))

    def _parts(self) -> tuple[type[CommError], ErrorKind, About, str, str]:
        return type(self), self.kind, self.about or self.operation, self.cause, self.cure

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, self._parts()


class _OfOneKind(CommError):
    kind: ErrorKind

    def __init__(self, about: About, cause: str, cure: str) -> None:
        super().__init__(type(self).kind, about, cause, cure)


class ConfigError(_OfOneKind):
    """A setting, an argument or a combination of choices is not valid."""

    kind = ErrorKind.CONFIG


class PluginError(_OfOneKind):
    """A backend is missing, broken, ambiguous or written for another version."""

    kind = ErrorKind.PLUGIN


class UnsupportedError(_OfOneKind):
    """The request is well formed, and this backend, build or version cannot do it."""

    kind = ErrorKind.UNSUPPORTED


class Closed(_OfOneKind):
    """The communicator, or the peer's, is closed."""

    kind = ErrorKind.CLOSED


class Full(_OfOneKind):
    """The bound on operations or bytes in flight is reached."""

    kind = ErrorKind.FULL


class CommTimeout(_OfOneKind, TimeoutError):
    """A limit expired.  Nothing has changed: the operation goes on and can be waited again."""

    kind = ErrorKind.TIMEOUT
    handle: Any = None
    """The handle to wait for again, where a blocking call has timed out and could not be undone."""

    def __new__(cls, *arguments: object) -> CommTimeout:
        return TimeoutError.__new__(cls)  # the one that lays out both bases


class Cancelled(_OfOneKind):
    """The receive was withdrawn by `Handle.cancel`; the message goes to the next receive."""

    kind = ErrorKind.CANCELLED


class PeerLost(_OfOneKind):
    """The peer is dead or unreachable, or has left by an error; `peer` is its rank."""

    kind = ErrorKind.PEER_LOST


class DeviceError(_OfOneKind):
    """This rank's own device, or its runtime, failed."""

    kind = ErrorKind.DEVICE


class ProtocolError(_OfOneKind):
    """A message is malformed, out of order, or not what the receiver asked for."""

    kind = ErrorKind.PROTOCOL


class LifetimeError(_OfOneKind):
    """A buffer was overwritten or freed while an operation still used it."""

    kind = ErrorKind.LIFETIME


_CLASSES = {each.kind: each for each in _OfOneKind.__subclasses__()}


def _rebuild(
    cls: type[CommError], kind: ErrorKind, about: About, cause: str, cure: str
) -> CommError:
    error = cls.__new__(cls)
    CommError.__init__(error, kind, about, cause, cure)
    return error
