"""Receives that were asked for: what they accept and what they yield."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from commlayer.errors import CommError, ErrorKind
from commlayer.lanes.targets import Target
from commlayer.progress.operation import Operation
from commlayer.wire.frame import Kind
from commlayer.wire.reader import Incoming

_CALLS = {
    Kind.TENSOR: "a tensor",
    Kind.OBJECT: "an object",
    Kind.TENSOR_DICT: "a tensor dict",
}


class MessageClaim:
    """Asks a lane for the next message, which must be of one kind and of one collective step.

    With `target` the message must be a tensor that fits it, and is received into it;
    without, into new memory.  `into` has the same for tensors of a dict, by key.
    `at_most` is the size in bytes that the sender must have declared for the tensor, too.
    """

    __slots__ = ("_into", "_kind", "_step", "_target", "at_most", "copies", "operation")

    def __init__(
        self,
        operation: Operation,
        kind: Kind,
        step: int = -1,
        target: Target | None = None,
        at_most: int = -1,
        into: Mapping[str, Target] | None = None,
    ) -> None:
        self.operation = operation
        self.at_most = at_most
        self._kind = kind
        self._step = step
        self._target = target
        self._into = into or {}
        self.copies = target is not None or bool(into)

    def leaves(self, incoming: Incoming) -> bool:
        if not self.copies:  # the usual case: anything of its kind fits new memory
            return False
        # A broadcast has its step: what is left there fits no later call.
        return self._step == -1 and self._other(incoming) is None and bool(self._misfit(incoming))

    def refusal(self, incoming: Incoming) -> CommError | None:
        other = self._other(incoming)
        if other is not None:
            return self._mismatch(other)
        if not self.copies:
            return None
        misfit = self._misfit(incoming)
        if misfit and self._step == -1:
            return CommError(
                ErrorKind.PROTOCOL,
                self.operation.describe(),
                misfit,
                "Receive into memory that fits, or into new memory: the message is kept for the "
                "next receive",
            )
        if misfit:
            return self._mismatch(misfit)
        return self._lost() if any(target.lost for target in self._targets()) else None

    def _targets(self) -> Iterable[Target]:
        return self._into.values() if self._target is None else (self._target,)

    def _other(self, incoming: Incoming) -> str | None:
        """Why `incoming` is another message than was asked for."""
        if incoming.kind is not self._kind:
            what = _CALLS.get(incoming.kind, "a message of the library's own")
            return f"the peer sent {what}, this rank receives {_CALLS[self._kind]}"
        if incoming.step != self._step:
            theirs, ours = _broadcast(incoming.step), _broadcast(self._step)
            if incoming.step >= 0:
                ours = ours.removeprefix("broadcast ")
            return f"the peer is at {theirs} of this channel, this rank at {ours}"
        if incoming.body.at_most != self.at_most:
            return (
                f"the peer declared {_size(incoming.body.at_most)}, this rank {_size(self.at_most)}"
            )
        size = incoming.schema.nbytes
        if size > self.at_most >= 0:
            return f"the peer sent {size} bytes and declared {self.at_most}"
        return None

    def _misfit(self, incoming: Incoming) -> str:
        """Why `incoming` does not fit the caller's memory; empty if it does."""
        body = incoming.body
        if self._target is not None:
            return self._target.misfit(body.tensors[0], body.placements[0])
        places = self._places(incoming)
        if places is None:
            return ""
        for key, target in self._into.items():
            index = places.get(key)
            if index is None:
                return f"the peer sent no tensor {key!r}"
            misfit = target.misfit(body.tensors[index], body.placements[index])
            if misfit:
                return f"{key!r}: {misfit}"
        return ""

    @staticmethod
    def _places(incoming: Incoming) -> dict[str, int] | None:
        return {} if incoming.parsed is None else incoming.parsed.places()

    def _lost(self) -> CommError:
        return CommError(
            ErrorKind.UNSUPPORTED,
            self.operation.describe(),
            "the tensor to receive into has lost its memory (its storage was freed or shrunk) "
            "since the receive was posted",
            "Keep its storage until the handle was waited; this message is lost, later ones are "
            "not",
        )

    def _mismatch(self, cause: str) -> CommError:
        return CommError(
            ErrorKind.PROTOCOL,
            self.operation.describe(),
            cause,
            "Make both ranks call the same operations in the same order; this message is lost, "
            "later ones are not",
        )

    def buffer(self, incoming: Incoming, index: int) -> Tensor | None:
        target = self._target
        if self._into:
            places = self._places(incoming) or {}
            target = next((t for key, t in self._into.items() if places[key] == index), None)
        return None if target is None else target.buffer(incoming.body.tensors[index])

    def value(self, incoming: Incoming) -> Any:
        tensors, written = incoming.tensors, {}
        if self.copies:
            # Once more, because payload may have been long under way.
            if any(target.lost for target in self._targets()):
                raise self._lost()
            if self._target is not None:
                return self._target.write(tensors[0], incoming.body.tensors[0])
            tensors = list(tensors)
            written = self._write(incoming, tensors)
        if incoming.parsed is None:
            return tensors[0]
        value = incoming.parsed.build([t for t in tensors if t is not None], self.operation)
        if written:
            value.update(written)
        return value

    def _write(self, incoming: Incoming, tensors: list[Tensor | None]) -> dict[str, Tensor]:
        """What is in the caller's memory, by key; and for each of `tensors` where it is."""
        places = self._places(incoming) if self._into else None
        if places is None:
            return {}
        written = {}
        for key, target in self._into.items():
            index = places[key]
            # One that was sent once and is wanted twice is copied from where it is.
            written[key] = tensors[index] = target.write(
                tensors[index], incoming.body.tensors[index]
            )
        return written


def _size(at_most: int) -> str:
    return "no size" if at_most < 0 else f"at_most = {at_most}"


def _broadcast(step: int) -> str:
    return f"broadcast {step}" if step >= -1 else f"step {-2 - step}"


def no_memory(operation: Operation, nbytes: int) -> CommError:
    """The error of a receive for whose message this rank has no memory."""
    return CommError(
        ErrorKind.PROTOCOL,
        operation.describe(),
        f"this rank has no memory for {nbytes} bytes of the message",
        "Send less at once, or receive into memory that is there; this message is lost, later ones "
        "are not",
    )


def not_built(operation: Operation, failure: Exception) -> CommError:
    """The error of a receive whose value raised `failure`."""
    return CommError(
        ErrorKind.PROTOCOL,
        operation.describe(),
        f"the value cannot be built ({type(failure).__name__}: {failure})",
        "See the cause; this message is lost, later ones are not",
    )
