"""A broadcast that is posted early and taken where its result is used.

A step posts or skips; later, the code that needs the tokens takes them.  Between
the two every rank does what does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, Protocol

from torch import Tensor

from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.handle import Handle
from commlayer.lanes.targets import Target
from commlayer.wire.integers import integer
from commlayer.wire.tensors import in_memory, meta_of, overlaps


class Broadcasts(Protocol):
    """What is used of a `commlayer.Communicator`, or of one of its channels."""

    @property
    def rank(self) -> int: ...
    def broadcast_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any] | None,
        src: int,
        async_op: bool = False,
        *,
        at_most: int | None = None,
    ) -> Any: ...


class _Raise(Enum):
    RAISE = "raise"


class _Target(Enum):
    INTO = "as posted"


@dataclass(frozen=True)
class _SlotMessage:
    """What the source said: its step, its operation, the tensor, and what all are to agree on."""

    step: int
    name: str
    tensor: Tensor
    agreed: tuple[int, ...]

    @classmethod
    def received(cls, fields: Mapping[str, Any]) -> _SlotMessage | None:
        """The message in a received dict; ``None`` if it is none."""
        if list(fields) != ["step", "name", "tensor", "agreed"]:
            return None
        step, name, tensor, agreed = fields.values()
        if not (isinstance(step, int) and isinstance(name, str)):
            return None
        if not (isinstance(tensor, Tensor) and isinstance(agreed, tuple)):
            return None
        return cls(step, name, tensor, agreed)


@dataclass(frozen=True)
class _PostedSlot:
    """The broadcast of a step that nobody has taken."""

    step: int
    agreed: tuple[int, ...]
    into: Tensor | None


@dataclass(frozen=True)
class _Skipped:
    step: int


class DeferredBroadcast:
    """The result of one operation, for one step at a time, broadcast from `src`.

    Every rank calls `post` or `skip` once for each step, with the engine's own
    step number, and then `take`.  Nothing is silent:

    - a step is taken once; taking again, or taking what was not posted, raises;
    - taking a skipped step raises, or gives the value that the caller states;
    - posting or skipping while a posted step is not taken is refused, or, with
      ``on_pending="drain"``, first waits for that step and throws it away; a
      skipped step need not be taken;
    - a rank whose steps differ from the source's (one skipped where the other
      posted, one is ahead, one called a different operation) raises PROTOCOL at
      `take`, naming step, operation and both ranks.  The next step that both
      post is right again, without more messages.

    Neither `post` nor `skip` waits for another rank, on the source either.  The
    shape and dtype are those that the source posts and may change from step to
    step.  The source must not overwrite its tensor before `sent` was waited.

    On a device transport nothing is received between `post` and `take` unless
    `at_most` declares the largest size of the tensor in bytes: see
    `commlayer.Communicator.broadcast`, and `overlaps`.

    `name` is the operation in errors; `comm` is best a channel of its own, where
    no other broadcast can be confused with it.  For one thread at a time.
    """

    def __init__(
        self,
        comm: Broadcasts,
        src: int,
        name: str = "tokens",
        *,
        on_pending: Literal["refuse", "drain"] = "refuse",
        at_most: int | None = None,
    ) -> None:
        if on_pending not in ("refuse", "drain"):
            raise ValueError(f"on_pending is 'refuse' or 'drain', not {on_pending!r}")
        self.name = name
        self.src = src
        self.sent: Handle | None = None
        """On the source, the handle of the last broadcast."""
        self._comm = comm
        self._at_most = at_most
        self._drains = on_pending == "drain"
        self._last = -1
        self._slot: _PostedSlot | _Skipped | None = None
        self._arriving: Handle | None = None
        """The receive of the source's next message."""
        self._message: _SlotMessage | None = None
        """A message that is here: on the source its own, else one of a later step."""
        self._ended: set[int] = set()
        """Steps whose take raised; the source may still send them."""
        self._closed = False

    @property
    def overlaps(self) -> bool:
        """Whether tensors on a device are received between `post` and `take`.

        That needs `at_most`.  The first message of a channel is not, nor is one
        while another of the channel is awaited.  Tensors on the host always are.
        """
        return self._at_most is not None

    @property
    def step(self) -> int:
        """The last step that was posted or skipped; -1 before the first."""
        return self._last

    @property
    def pending(self) -> int | None:
        """The step that was posted and not taken, or ``None``."""
        return self._slot.step if isinstance(self._slot, _PostedSlot) else None

    def post(
        self,
        step: int,
        tensor: Tensor | None = None,
        *,
        into: Tensor | None = None,
        agreed: Sequence[int] = (),
        timeout: float | None = None,
    ) -> None:
        """Broadcast `tensor` of the source as the result of `step`; others pass ``None``.

        On the others `into` is memory that `take` puts the result into, such as that of a
        graph: of its dtype, and as many elements or fewer.

        `step` must grow.  `agreed` is what all ranks know about it and must know
        alike: a rank that differs raises at `take`.  `timeout` limits draining
        the step before, in seconds; when it expires nothing has changed.
        """
        is_source = self._comm.rank == self.src
        if is_source != (tensor is not None):
            raise self._misuse(
                step,
                "the source posts a tensor and no other rank does",
                f"Pass a tensor on rank {self.src} only",
            )
        if is_source and into is not None:
            raise self._misuse(
                step, "the source has its tensor and receives nothing", "Pass into on other ranks"
            )
        step = self._begin(step, timeout)
        agreed = tuple(agreed)
        if tensor is not None:
            self.sent = self._broadcast(
                {"step": step, "name": self.name, "tensor": tensor, "agreed": agreed}
            )
            self._message = _SlotMessage(step, self.name, tensor, agreed)
        elif self._message is None:
            self._arriving = self._arriving or self._broadcast(None)
        self._slot = _PostedSlot(step, agreed, into)
        self._last = step

    def skip(self, step: int, *, timeout: float | None = None) -> None:
        """Say that `step` has no result.  Every rank says so; no message is sent."""
        step = self._begin(step, timeout)
        self._slot = _Skipped(step)
        self._last = step

    def take(
        self,
        timeout: float | None = None,
        *,
        skipped: Any = _Raise.RAISE,
        into: Tensor | Literal[_Target.INTO] | None = _Target.INTO,
    ) -> Any:
        """The tensor of the step that was posted; waits until it is here.

        On the source it is the tensor that was posted, at once.  `skipped` is
        what a skipped step gives; without it, taking one raises.  `CommTimeout`
        changes nothing: take again.  Any other error ends the step.

        `into` is the memory that it is put into, in place of the one that was posted;
        ``None`` for new memory.  The result is that tensor, or a view of its first
        elements where fewer were sent.  What does not fit raises PROTOCOL and stays
        here: take it again into other memory.
        """
        self._check_open(self._last)
        slot = self._slot
        if slot is None:
            cause = "it was taken already" if self._last >= 0 else "nothing was posted yet"
            raise self._misuse(self._last, cause, "Take each posted step once")
        if isinstance(slot, _Skipped):
            self._slot = None
            if skipped is not _Raise.RAISE:
                return skipped
            raise self._misuse(
                slot.step,
                "the step was skipped: it has no result",
                "Do not take it, or pass skipped=... to say what it gives",
            )
        try:
            message = self._matched(slot, timeout)
        except CommTimeout:
            raise
        except CommError:
            self._slot = None
            self._ended.add(slot.step)
            raise
        into = slot.into if into is _Target.INTO else into
        tensor = message.tensor
        if into is not None and self._comm.rank != self.src:
            # Until it has a place, it is what the next take finds.
            self._message = message
            tensor = self._put(tensor, into)
            self._message = None
        self._slot = None
        self._ended.clear()
        return tensor

    def _put(self, tensor: Tensor, into: Tensor) -> Tensor:
        where = self._operation(self._last)
        in_memory(into, where)
        target, sent = Target(into, None), meta_of(tensor)
        cause = target.misfit(sent, 0)
        if overlaps(into):
            cause = "a tensor with several elements in one place cannot be received into"
        if cause:
            raise CommError(
                ErrorKind.PROTOCOL, where, cause, "Take it into memory that fits, or into None"
            )
        return target.write(tensor, sent)

    def close(self) -> int | None:
        """Refuse all later calls; never waits.

        Returns the posted step that nobody took, or ``None``.  Its broadcast is still
        received, and thrown away.
        """
        pending = self.pending
        self._slot = None
        self._message = self._arriving = None
        self._closed = True
        return pending

    # How

    def _broadcast(self, fields: Mapping[str, Any] | None) -> Handle:
        handle: Handle = self._comm.broadcast_tensor_dict(
            fields, self.src, async_op=True, at_most=self._at_most
        )
        return handle

    def _begin(self, step: int, timeout: float | None) -> int:
        self._check_open(step)
        number = integer(step)
        if number is None or number <= self._last:
            raise self._misuse(
                step,
                f"the last step was {self._last}: steps are integers that grow",
                "Post or skip each step once",
            )
        if self.pending is None:
            return number
        if not self._drains:
            raise self._misuse(
                step,
                f"step {self.pending} was not taken and would be overwritten",
                "Take it first, or use on_pending='drain'",
            )
        self.take(timeout)
        return number

    def _matched(self, slot: _PostedSlot, timeout: float | None) -> _SlotMessage:
        """The message of the step of `slot`, from the source's next message or a later one."""
        while True:
            message = self._message or self._received(slot.step, timeout)
            if message.step > slot.step:
                self._message = message
                raise self._mismatch(
                    slot.step, f"rank {self.src} has none: it is at step {message.step}"
                )
            self._message = None
            if message.step not in self._ended:
                break
        if message.step < slot.step:
            raise self._mismatch(
                slot.step,
                f"rank {self.src} broadcast step {message.step} as well, which rank "
                f"{self._comm.rank} did not post",
            )
        if message.agreed != slot.agreed:
            raise self._mismatch(
                slot.step,
                f"rank {self.src} posted it for {list(message.agreed)}, rank {self._comm.rank} "
                f"for {list(slot.agreed)}",
            )
        return message

    def _received(self, step: int, timeout: float | None) -> _SlotMessage:
        """The source's next message.  A `CommTimeout` leaves its receive posted."""
        arriving = self._arriving = self._arriving or self._broadcast(None)
        try:
            message = _SlotMessage.received(arriving.result(timeout))
        except CommTimeout as error:
            raise CommTimeout(
                self._operation(step),
                f"rank {self.src} has not posted it, or rank {self._comm.rank} has not received "
                f"it, within {timeout:g} s",
                f"It goes on: take it again, or see whether rank {self.src} skipped the step",
            ) from error
        except CommError as error:
            self._arriving = None
            own = self._operation(step)
            about = own if error.about is None else replace(error.about, text=own)
            raise CommError(error.kind, about, str(error), "See the cause") from error
        self._arriving = None
        if message is None or message.name != self.name:
            what = "something else" if message is None else f"{message.name!r}"
            raise self._mismatch(step, f"rank {self.src} broadcast {what} on this channel")
        return message

    def _check_open(self, step: int) -> None:
        if self._closed:
            raise CommError(
                ErrorKind.CLOSED, self._operation(step), "this rank has closed it", "Make a new one"
            )

    def _operation(self, step: int) -> str:
        return f"{self.name} of step {step} from rank {self.src}"

    def _misuse(self, step: int, cause: str, cure: str) -> CommError:
        return CommError(ErrorKind.CONFIG, self._operation(step), cause, cure)

    def _mismatch(self, step: int, cause: str) -> CommError:
        return CommError(
            ErrorKind.PROTOCOL,
            self._operation(step),
            cause,
            "Make all ranks post and skip the same steps, for the same rows; later steps are not "
            "affected",
        )
