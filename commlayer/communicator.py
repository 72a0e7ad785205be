"""The engine-facing interface: sends, receives and broadcasts that keep their promise."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from commlayer.barrier import Barrier
from commlayer.config import CommConfig
from commlayer.errors import ConfigError, in_a_line
from commlayer.handle import Handle, within
from commlayer.observe.peers import PeerView, view_peers
from commlayer.observe.report import Report
from commlayer.pipeline.exchange import Exchange
from commlayer.pipeline.parts import receive_parts, send_parts
from commlayer.pipeline.slices import WholeDictClaim
from commlayer.progress.deadline import checked_timeout
from commlayer.progress.ledger import Ledger
from commlayer.semantics import Semantics
from commlayer.session import Session
from commlayer.wire.frame import Kind
from commlayer.wire.modes import outside_modes, uncompiled


@uncompiled
class Communicator:
    """Sends, receives and broadcasts between the ranks that connected together.

    Ranks are local to the communicator.  Every method may be called from any thread; the order of
    what several threads post is theirs to fix, and must be the same on every rank.  A signal
    handler or finalizer (``__del__``, ``weakref.finalize``) runs inside another call, under its
    locks: it must not call a method but may raise, or set a flag that the program looks at.
    Posting an operation never waits for the peer below the bounds ``max_inflight_ops`` and
    ``max_inflight_bytes``.

    A source tensor must not be overwritten before the handle of its send was waited, unless
    ``retention = "copy_on_post"`` copied it; it may be dropped at once, and so may the handle.
    ``untyped_storage().resize_`` overwrites, too: it frees or moves memory that is held.

    All methods raise `CommError`: CONFIG for a wrong argument, CLOSED after `close` or after the
    peer's, PEER_LOST when the peer is gone, FULL at the bound, UNSUPPORTED for what cannot be sent,
    before anything leaves the rank.
    """

    def __init__(
        self, session: Session, channel: str, channels: Mapping[str, Communicator]
    ) -> None:
        self._session = session
        self._connection = session.connection
        self._channel = channel
        self._channels = channels
        self._posting = session.posting(channel)
        self._barrier = Barrier(self._posting, self._connection)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._connection.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._connection.size

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._session.backend

    @property
    def semantics(self) -> Semantics:
        """The facts that the backend declares."""
        return self._session.semantics

    @property
    def config(self) -> CommConfig:
        """The configuration in effect."""
        return self._session.config

    @property
    def ledger(self) -> Ledger:
        """All operations in flight, of every channel."""
        return self._connection.ledger

    def channel(self, name: str) -> Communicator:
        """The same calls on lanes of their own: what waits on one channel holds up no other.

        Channels are the built-in ``data`` (this one, by default), ``control``, ``fold`` and
        ``broadcast``, and those named in the configuration.  Closing one closes all.
        """
        try:
            return self._channels[name]
        except (KeyError, TypeError):
            known = ", ".join(self._channels)
            cure = f"Add it to `channels` in the configuration; known: {known}"
            cause = "it was not named when the ranks connected"
            raise ConfigError(f"channel {name!r}", cause, cure) from None

    @outside_modes
    def split(
        self, ranks: Sequence[int] | None = None, *, color: int | str | None = None, name: str = ""
    ) -> Communicator | None:
        """A communicator of some of the ranks, which closes on its own.

        With `ranks` these call it, with the same list, and are numbered in its order.  Without,
        every rank calls it, and those of equal `color` make one, in their order; a rank without a
        color gets ``None``.  Blocks and raises as `connect`; `name` is that of the new one.
        """
        self._connection.check_own()
        return self._session.part(ranks, color, name)  # type: ignore[no-any-return]

    @outside_modes
    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank has called it, on one thread at a time; messages may be under way.

        A wait that ends by `CommTimeout` after `timeout` seconds is taken up by the next call.
        """
        self._connection.check_own()
        self._barrier.wait(timeout)

    # Tensors

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle[None]:
        """Post a send of `tensor` (any dense dtype, shape and strides) to rank `dst`.

        `tag` (0 to 65535) selects a lane: messages of one tag arrive in order, messages of
        different tags do not wait for each other.
        """
        return self._posting.send("isend", Kind.TENSOR, tensor, dst, tag)

    def irecv(self, tensor: Tensor | None, src: int, tag: int = 0) -> Handle[Tensor]:
        """Post a receive from rank `src` into `tensor`; ``result()`` returns it.

        The message must have the dtype of `tensor` and as many elements, in any shape, or fewer:
        then ``result()`` is a view of the first ones, in the shape that was sent.  Another dtype,
        or more, fails this receive (PROTOCOL) before anything is received, and the message is left
        to the next receive.  With ``None`` the tensor is allocated as it was sent.
        """
        return self._posting.receive("irecv", Kind.TENSOR, src, tag, tensor)

    def send(self, tensor: Tensor, dst: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send `tensor` and wait until it may be overwritten.

        Every blocking call takes a `timeout` in seconds.  One that expires raises `CommTimeout` and
        loses nothing: a receive is withdrawn, so that the next one gets the message; what cannot be
        withdrawn goes on, and is the error's `handle`.
        """
        within(self.isend(tensor, dst, tag), timeout)

    def recv(
        self, tensor: Tensor | None, src: int, tag: int = 0, *, timeout: float | None = None
    ) -> Tensor:
        """Receive into `tensor` (or new memory for ``None``) and return it."""
        return within(self.irecv(tensor, src, tag), timeout)

    # Objects and tensor dicts

    def isend_object(self, obj: Any, dst: int, tag: int = 0) -> Handle[None]:
        """Post a send of a value to rank `dst`; `tag` is as for `isend`, on lanes of their own.

        A value is any tree of ``None``, bool, int, float, complex, str, bytes, list, tuple, set,
        dict (any mapping, which arrives as a dict), tensors, torch dtypes, devices and sizes, numpy
        arrays and scalars, dates, times, paths, ``deque``, ``UUID``, ``Decimal``, and instances of
        classes that were registered (`commlayer.register`).  Anything else needs ``allow_pickle``.
        """
        return self._posting.send("isend_object", Kind.OBJECT, obj, dst, tag)

    def irecv_object(self, src: int, tag: int = 0) -> Handle:
        """Post a receive of a value from rank `src`; ``result()`` returns it.  Never blocks."""
        return self._posting.receive("irecv_object", Kind.OBJECT, src, tag)

    def send_object(
        self, obj: Any, dst: int, tag: int = 0, *, timeout: float | None = None
    ) -> None:
        """Send a value and wait until it may be changed; `timeout` is as for `send`."""
        within(self.isend_object(obj, dst, tag), timeout)

    def recv_object(self, src: int, tag: int = 0, *, timeout: float | None = None) -> Any:
        """Receive a value from rank `src`; `timeout` is as for `send`."""
        return within(self.irecv_object(src, tag), timeout)

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int,
        all_gather_group: Communicator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        tag: int = 0,
    ) -> Handle[None]:
        """Post a send of a dict of str to tensors or values; the order of its keys is kept.

        `tag` is that of `isend_object`: objects and dicts of one tag arrive in order.  With
        `all_gather_group`, whose ranks all call this with equal tensors, each rank sends its part
        of every tensor of the dict, nested ones excepted, and the receivers gather.  Sent whole are
        a tensor of which `all_gather_tensors` says False (it is not replicated), and one whose
        number of elements is no multiple of the group's size.  ``check_slices`` makes the ranks
        compare first; one that differs raises CONFIG on all of them.
        """
        if all_gather_group is None:
            return self._posting.send("isend_tensor_dict", Kind.TENSOR_DICT, tensor_dict, dst, tag)
        parts = tensor_dict, dst, tag, all_gather_group, all_gather_tensors
        return send_parts(self._posting, self.config, self._channel, *parts)

    def irecv_tensor_dict(
        self,
        src: int,
        all_gather_group: Communicator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        tag: int = 0,
        *,
        into: Mapping[str, Tensor] | None = None,
    ) -> Handle[dict[str, Any]]:
        """Post a receive of a tensor dict from `src`; ``result()`` returns it.  Never blocks.

        Tensors whose keys `into` has are received into those, as by `irecv`: static memory for
        graphs, say.  A message that has no such tensor, or one that does not fit, fails this
        receive before anything is received, and is left to the next.

        `all_gather_group` is the communicator of the ranks that receive the other parts, as many as
        the sender's group has; see `GatherHandle` for what they owe each other.  Which tensors come
        in parts is in the message: `all_gather_tensors` is not looked at.
        """
        if all_gather_group is not None:
            parts = src, tag, all_gather_group, self._connection.device, into
            return receive_parts(self._posting, self.config, self._channel, *parts)
        call = "irecv_tensor_dict", src, "recv", Kind.TENSOR_DICT, tag
        operation = self._posting.operation(*call)
        targets = None if into is None else self._posting.targets(into, operation)
        return self._posting.receive_claim(WholeDictClaim(operation, targets))

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int,
        all_gather_group: Communicator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        tag: int = 0,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send a tensor dict and wait until its tensors may be overwritten."""
        handle = self.isend_tensor_dict(tensor_dict, dst, all_gather_group, all_gather_tensors, tag)
        within(handle, timeout)

    def recv_tensor_dict(
        self,
        src: int,
        all_gather_group: Communicator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        tag: int = 0,
        *,
        into: Mapping[str, Tensor] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Receive a tensor dict from rank `src`."""
        handle = self.irecv_tensor_dict(src, all_gather_group, all_gather_tensors, tag, into=into)
        return within(handle, timeout)

    # Broadcasts

    def broadcast(
        self,
        tensor: Tensor | None,
        src: int,
        async_op: bool = False,
        *,
        at_most: int | None = None,
        step: int | None = None,
    ) -> Any:
        """Send `tensor` of rank `src` to every other rank.

        Every rank calls it, in the same order.  Other ranks receive into `tensor`, or with ``None``
        into a tensor of the shape and dtype that were sent.  Returns the tensor, or with `async_op`
        a handle whose ``result()`` is the tensor.

        A rank that skips a call receives the broadcast of another step next: with one source
        nothing in the message can say so, and only `close` logs it.  `step`, the caller's own
        number for the step, the same on every rank, has it noticed at once: the call raises
        PROTOCOL where the source's differs.  With several sources a rank that is a broadcast behind
        or ahead raises PROTOCOL in any case.

        A receive of a tensor on a device is posted when its header is here, in the next call of the
        receiver: nothing is received before.  `at_most`, the same on every rank and in every call
        on the channel, declares the largest size of the tensor in bytes and has it posted at once:
        always so many bytes are sent, and a result in new memory is the first part of them.  The
        first message of a channel is not received ahead, nor is one while another is awaited.  The
        tensor must be on the device then.  Where there is no device, `at_most` is checked and
        changes nothing.

        Raises CONFIG where the tensor is larger and where the channel has another `at_most`;
        receivers whose `at_most` differs raise PROTOCOL.
        """
        handle = self._posting.broadcast("broadcast", Kind.TENSOR, tensor, src, at_most, step)
        return handle if async_op else handle.result()

    def broadcast_object(
        self, obj: Any, src: int, async_op: bool = False, *, step: int | None = None
    ) -> Any:
        """Send a value of rank `src` to every other rank; what they pass is ignored.

        Returns the value, or with `async_op` a handle whose ``result()`` is the value.  `step` is
        as for `broadcast`.
        """
        handle = self._posting.broadcast("broadcast_object", Kind.OBJECT, obj, src, step=step)
        return handle if async_op else handle.result()

    def broadcast_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any] | None,
        src: int,
        async_op: bool = False,
        *,
        at_most: int | None = None,
        step: int | None = None,
    ) -> Any:
        """Send a tensor dict of rank `src` to every other rank; what they pass is ignored.

        Returns the dict, or with `async_op` a handle whose ``result()`` is the dict.  `at_most` and
        `step` are as for `broadcast`; a dict with `at_most` has exactly one tensor.
        """
        call, kind = "broadcast_tensor_dict", Kind.TENSOR_DICT
        handle = self._posting.broadcast(call, kind, tensor_dict, src, at_most, step)
        return handle if async_op else handle.result()

    # Streams, and work of others

    @contextmanager
    def side_stream(self, uses: Any = ()) -> Iterator[Communicator]:
        """Work on another stream of the device in a ``with`` block; yields this communicator.

        The side stream waits for the current one and is current inside, so that kernels and
        operations of the block are given to it.  Nothing waits for it at the end: what the block
        yields is a handle, whose ``wait()`` orders the stream of the result's user, not the host.

        `uses` are the tensors made outside that the block's kernels read or write, in containers
        nested to any depth; they are kept alive for the side stream (not unchanged).  Tensors made
        inside, and those that only operations of the communicator read, need no mention.  With
        ``check_lifetime``, a torch operation that uses any other tensor of the device raises
        LIFETIME naming both.  Raises CONFIG for an object in `uses` that may hide tensors.

        On a backend without a device the block runs as it is, and the host waits.
        """
        with self._session.side_streams.enter(uses):
            yield self

    def track(self, work_or_event: Any, retain: Any = ()) -> Handle[None]:
        """Give a handle, and retention, to asynchronous work that was started elsewhere.

        `work_or_event` is a device event recorded after the work, or a work as c10d's collectives
        return it, of a transport with the facts of this backend (``semantics.collective``); only
        the handle may be waited from now on, unless those say ``wait_repeatable``.  `retain`
        (anything, nested) is held until the work is complete, whether or not anybody waits.

        ``wait()`` of device work orders the current stream and ``synchronize()`` blocks the host;
        of other work both block the host.  The ledger lists it as ``track``; bounds and `drain` are
        about sends and do not count it.  `close` waits for it within its limit.

        Raises CONFIG for something else, UNSUPPORTED for a work of a transport that only the
        caller's thread may touch.
        """
        return self._session.track(work_or_event, retain, self._channel)

    @property
    def peers(self) -> dict[int, PeerView]:
        """Every other rank: whether it is there, where it runs, and what has become of it."""
        return view_peers(self._connection.peers)

    # When it is stuck

    @outside_modes
    def report(self, timeout: float = 5.0) -> Report:
        """Ask every rank what it waits for, and say who waits for whom, since when and why.

        Waits at most `timeout` seconds; ranks that did not answer are named.  Other ranks need not
        call it: their libraries answer on their own, on a transport that moves only inside calls
        with the next call.  Print it for people.
        """
        limit = checked_timeout(timeout)
        self._connection.check_own()
        return self._session.observation.report(5.0 if limit is None else limit)

    @property
    def last_report(self) -> Report | None:
        """The last report that was logged because something did not move."""
        return self._session.observation.last_report

    def dump(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Write what the flight recorder remembers into `folder` (default: ``trace_dir``).

        Returns the file.  When every rank has done so, ``commlayer trace FOLDER`` joins them.
        Raises `CommError` (CONFIG) where nothing is recorded or it cannot be written.
        """
        self._connection.check_own()  # the records, and the file's name, are the parent's
        return self._session.observation.dump(folder)

    # Endings

    @outside_modes
    def drain(self, timeout: float | None = None) -> None:
        """Wait until every send of every channel is locally complete.

        Raises `CommTimeout` naming what is not, after `timeout` seconds.  Failed ones do not count.
        """
        limit = checked_timeout(timeout)
        self._connection.check_own()
        self.ledger.drain(limit)

    @outside_modes
    def close(self, timeout: float | None = None) -> None:
        """Drain, part from every peer, and release the transport.

        `timeout` is in seconds and defaults to ``close_timeout``.  Pending receives fail (CLOSED).
        Raises `CommError` naming sends that were not delivered, or `CommTimeout` naming peers that
        did not answer; the communicator is closed all the same.  A second close does nothing.
        """
        self._session.close(timeout)

    @outside_modes
    def abort(self, error: BaseException | str) -> None:
        """Leave because of `error`, and tell every peer so in one round trip.

        Nothing is drained, pending operations fail (CLOSED), and nothing is raised.  On the peers
        everything with this rank fails as ``PeerLost``: ``rank 2 left: ValueError: ...``; where
        this rank leaves because it has lost another one, they are told of that loss instead.
        Messages that have arrived can still be received.  ``with comm:`` calls this when its block
        ends by an exception.
        """
        self._session.abort(in_a_line(error))

    def __enter__(self) -> Communicator:
        return self

    @outside_modes
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._session.leave(error)

    def __repr__(self) -> str:
        state = "open" if self._connection.closed is None else "closed"
        name = f"{self.config.own_name}, " if self.config.own_name else ""
        place = f"rank {self.rank} of {self.world_size}, {self.backend}, channel {self._channel}"
        return f"<Communicator {name}{place}, {state}>"

    @property
    def _exchange(self) -> Exchange:
        return self._session.exchange(self._channel, self._posting)
