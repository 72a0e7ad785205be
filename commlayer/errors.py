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


class CommError(RuntimeError):
    """An error that names the operation, the cause and the cure.

    `operation` describes what was attempted (kind, peer, channel, sequence
    number, size), `cause` what happened and `cure` what to do about it.  All
    three are plain text and part of ``str(error)``.
    """

    def __init__(self, kind: ErrorKind, operation: str, cause: str, cure: str) -> None:
        self.kind = kind
        self.operation = operation
        self.cause = cause
        self.cure = cure
        super().__init__(f"{operation}: {cause}. {cure}" if cure else f"{operation}: {cause}.")

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

    def __init__(self, operation: str, cause: str, cure: str) -> None:
        super().__init__(ErrorKind.TIMEOUT, operation, cause, cure)


def _rebuild(
    cls: type[CommError], kind: ErrorKind, operation: str, cause: str, cure: str
) -> CommError:
    error = cls.__new__(cls)
    CommError.__init__(error, kind, operation, cause, cure)
    return error
