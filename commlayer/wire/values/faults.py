"""What can be wrong with a received value."""

from __future__ import annotations

from commlayer.errors import About, CommError, ErrorKind


class Malformed(Exception):
    """What is wrong with the received bytes: no commlayer of this configuration wrote them."""

    what = "the received value is malformed or not acceptable"
    fate = ""

    def __init__(
        self, cause: str, cure: str = "Check that all ranks run the same version and configuration"
    ) -> None:
        super().__init__(cause[:300])
        self.cure = cure

    def error(self, operation: About) -> CommError:
        """The error of the receive `operation`."""
        return CommError(
            ErrorKind.PROTOCOL, operation, f"{self.what}: {self}", f"{self.cure}{self.fate}"
        )


class Unbuildable(Malformed):
    """Why a value that was sent rightly cannot be made on this rank."""

    what = "the received value cannot be made on this rank"
    fate = "; this message is lost, later ones are not"


def no_memory(error: MemoryError) -> Unbuildable:
    """There is no memory for a value, as `error` says."""
    failure = Unbuildable("there is no memory for it", "Send less at once")
    failure.__cause__ = error
    return failure
