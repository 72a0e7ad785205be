"""What takes part in a comparison: a name, and a way to send each kind of message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["tensor", "object", "dict", "broadcast"]
"""What is sent: one tensor, one Python value, a dict of tensors, or a tensor to every rank."""

Finish = Callable[[], Any]
"""Waits for an operation that was posted; a receive returns what arrived."""


class Unavailable(Exception):
    """The contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Way:
    """How a contender sends one kind of message.

    ``send(value, peer)`` posts, ``receive(like, peer)`` posts the receive of a
    message that looks like `like`; only a contender that is told shapes in
    advance looks at it.  For a broadcast `peer` is its source, on all ranks.
    """

    send: Callable[[Any, int], Finish]
    receive: Callable[[Any, int], Finish]


class Contender:
    """One way to communicate, connected.

    `early` says whether a receive may be posted long before its message: posting
    does not block.  `driven` says that a send makes progress only while somebody
    waits for it.
    """

    def __init__(
        self,
        name: str,
        ways: Mapping[Kind, Way],
        *,
        early: bool = True,
        driven: bool = False,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.ways = ways
        self.early = early
        self.driven = driven
        self.close = close
