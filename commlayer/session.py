"""What all channels of one communicator share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from commlayer.config import CommConfig
from commlayer.device.completion import StreamCompletion
from commlayer.device.foreign import Tracker
from commlayer.device.reach import Memory
from commlayer.device.side_stream import SideStreams
from commlayer.errors import CommError, UnsupportedError, in_a_line
from commlayer.handle import Handle
from commlayer.lanes.connection import Connection
from commlayer.lanes.encode import Encoder
from commlayer.lanes.posting import BroadcastState, Posting
from commlayer.observe.observation import Observation
from commlayer.pipeline.exchange import Exchange
from commlayer.progress.completion import HostCompletion, Waiting
from commlayer.progress.deadline import Deadline, checked_timeout
from commlayer.progress.operation import calling_site
from commlayer.progress.retention import DeviceHold, RetentionPolicy
from commlayer.semantics import Semantics

logger = logging.getLogger("commlayer")

ABORT_SECONDS = 2.0
"""Most that telling peers of a failure may take: one that answers does so in a round trip."""


class Split(Protocol):
    """See `commlayer.bootstrap.split`, which this package does not know."""

    def by_ranks(self, ranks: Sequence[int], name: str) -> Any: ...

    def by_color(self, color: int | str | None, name: str) -> Any: ...


class Session:
    """What a communicator is made of, and how it ends."""

    def __init__(
        self,
        *,
        connection: Connection,
        backend: str,
        semantics: Semantics,
        host_devices: tuple[str, ...],
        config: CommConfig,
        retention: RetentionPolicy,
        release: Callable[[], None],
    ) -> None:
        self.connection = connection
        self.backend = backend
        self.semantics = semantics
        self.config = config
        self.device_hold = getattr(retention, "device_hold", DeviceHold.COMPLETION)
        self.release = release
        self.broadcasts = {name: BroadcastState() for name in connection.tags.channels}
        self.observation: Observation
        self.split: Split | None = None
        """Makes communicators of some of the ranks; ``None`` where these have met in no store."""
        self._exchanges: dict[str, Exchange] = {}
        device = connection.device
        self.memory = Memory(backend, semantics, host_devices, device)
        self.encoder = Encoder(
            config=config,
            retention=retention,
            memory=self.memory,
            side=device,
        )
        host = HostCompletion(connection.ledger, connection.progress, connection.runtime)
        self.completion: Waiting = host if device is None else StreamCompletion(host, device)
        """What it means to wait for an operation: all handles share it."""
        self.tracker = Tracker(connection.runtime, connection.ledger, device, semantics)
        self.side_streams = SideStreams(
            None if device is None else device.device,
            lambda event, tensors: self.tracker.track(event, tensors, ("data", connection.rank)),
            check=config.check_lifetime,
        )

    def part(self, ranks: Sequence[int] | None, color: int | str | None, name: str) -> Any:
        """A communicator of some of the ranks; see `Communicator.split`."""
        if self.connection.closed is not None:
            raise self.connection.closed.again()
        if self.split is None:
            raise UnsupportedError("split", "these ranks have met in no store", "")
        if ranks is None:
            return self.split.by_color(color, name)
        return self.split.by_ranks(ranks, name)

    def posting(self, channel: str) -> Posting:
        """What posts the operations of `channel`."""
        # The default channel leaves its own lanes to sends: a broadcast never waits behind one.
        broadcasts = "broadcast" if channel == "data" else channel
        return Posting(
            self.connection,
            self.encoder,
            self.memory,
            self.config,
            self.device_hold,
            self.completion,
            channel,
            broadcasts,
            self.broadcasts[broadcasts],
        )

    def close(self, timeout: float | None = None, failure: str = "") -> None:
        """Close the connection and release the transport if nothing is left inside it.

        A `failure` is told to every peer.

        Tracked work that does not complete in time goes on, and keeps the transport.
        """
        limit = checked_timeout(timeout)
        limit = self.config.close_timeout if limit is None else limit
        deadline = Deadline(self.connection.runtime.now, limit)
        try:
            if self.connection.close(limit, failure) and self.tracker.join(deadline):
                self.release()
        finally:
            self.observation.close()

    def abort(self, failure: str) -> None:
        """Close because of `failure` and tell every peer; raises nothing.

        What is undelivered stays so, and tracked work is not waited for.
        """
        try:
            limit = min(ABORT_SECONDS, self.config.close_timeout)
            if self.connection.close(limit, failure, drain=False):
                self.release()
        except CommError as error:
            logger.debug("commlayer: left by an error: %s", error)
        finally:
            self.observation.close()

    def leave(self, error: BaseException | None) -> None:
        """End as a ``with`` block does that ends by `error`."""
        if error is None:
            self.close()
        elif isinstance(error, SystemExit) and not error.code:
            with suppress(CommError):  # the program ends well, whoever does not
                self.close()
        else:
            self.abort(in_a_line(error))

    def track(self, work: Any, retain: Any, channel: str) -> Handle[None]:
        """A handle for work that was started elsewhere; see `Communicator.track`."""
        if self.connection.closed is not None:
            raise self.connection.closed.again()
        site = calling_site() if self.config.record_sites else None
        where = channel, self.connection.rank
        return Handle(self.tracker.track(work, retain, where, site), self.tracker.completion)

    def exchange(self, channel: str, posting: Posting) -> Exchange:
        """What the ranks give each other on `channel`, made once something is to be given."""
        found = self._exchanges.get(channel)
        if found is None:
            made = Exchange(tuple(self.connection.peers), self.connection.runtime, posting)
            # `setdefault` is atomic: of several threads that make one, all use the first.
            found = self._exchanges.setdefault(channel, made)
        return found

    def steps(self) -> dict[str, int]:
        """How many broadcasts each channel has had."""
        return {name: state.step for name, state in self.broadcasts.items()}
