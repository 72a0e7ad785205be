"""What a rank knows of its peers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from commlayer.errors import CommError, PeerLost
from commlayer.lanes.peer import Peer


class PeerView(msgspec.Struct, frozen=True):
    """One other rank.

    `state` is ``"connected"``; ``"closed"`` once it has closed; ``"left"`` when it did so
    because of an error; ``"lost"`` when it died or cannot be reached.  `since` is when that
    began, in seconds since the epoch, and `reason` why, in words; both as this rank has
    learnt it.
    """

    rank: int
    state: Literal["connected", "closed", "left", "lost"]
    host: str
    pid: int
    since: float
    reason: str


def view_peers(peers: Mapping[int, Peer]) -> dict[int, PeerView]:
    """All of `peers`, by rank."""
    return {rank: _view(peer) for rank, peer in peers.items()}


def lost_ranks(peers: Mapping[int, Peer]) -> set[int]:
    """Ranks that are lost, or have left by an error, as this rank knows or was told."""
    errors = (peer.error for peer in peers.values() if isinstance(peer.error, PeerLost))
    return {error.peer for error in errors if error.peer is not None}


def _view(peer: Peer) -> PeerView:
    error = peer.error
    reason = "" if error is None else error.cause
    return PeerView(peer.rank, _state(peer, error), *peer.whereabouts, peer.since, reason)


def _state(peer: Peer, error: CommError | None) -> Literal["connected", "closed", "left", "lost"]:
    if error is None:
        return "connected"
    if peer.lost:
        return "lost"
    # A rank that closed after another one was lost is told of that one's loss.
    return "left" if isinstance(error, PeerLost) and error.peer == peer.rank else "closed"
