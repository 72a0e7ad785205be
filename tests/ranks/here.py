"""`commlayer_testkit.conformance.ranks.here`, and a communicator of all ranks over gloo."""

from __future__ import annotations

import itertools
from typing import Any

from commlayer_testkit.conformance.ranks.here import hear, meet, rank, say, store, world_size

import commlayer
from commlayer.communicator import Communicator

__all__ = ["connect", "hear", "meet", "rank", "say", "store", "world_size"]

_connections = itertools.count()


def connect(**settings: Any) -> Communicator:
    """A communicator of all ranks of this run, over gloo unless `settings` say otherwise.

    The lifetime of sources is checked, and little travels inside headers, unless they
    say otherwise.  Returns once every rank has connected, so that one may be stopped or
    killed from then on.
    """
    defaults = {
        "backend": "gloo", "connect_timeout": 20.0, "check_lifetime": True, "inline_bytes": 8192,
    }  # fmt: skip
    comm = commlayer.connect({**defaults, **settings})
    meet(f"connection {next(_connections)}")
    return comm
