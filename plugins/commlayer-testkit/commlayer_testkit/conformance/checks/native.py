"""L2, below the core: the transport's endpoint itself does what the facts say.

Payloads are large and no eager transport's threshold applies, unless a check says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from commlayer.backend import Endpoint
from commlayer.backend import World as BackendWorld
from commlayer.device.backend import StreamTransport
from commlayer_testkit.conformance.checks.tools import until
from commlayer_testkit.conformance.gates import (
    EAGER,
    EXACT_POLL,
    HOST,
    PER_TAG,
    REPEATABLE,
    SEVERAL_OUTSTANDING,
    TAGS,
    UNBLOCKED_POSTS,
)
from commlayer_testkit.conformance.lab import Lab
from commlayer_testkit.conformance.ranks import here
from commlayer_testkit.conformance.rules import Level, rule
from commlayer_testkit.conformance.subject import Subject

LARGE = 1 << 20


@contextmanager
def endpoint(subject: Subject) -> Iterator[Endpoint]:
    """One native communicator of both ranks of the run."""
    world = BackendWorld(here.rank(), here.world_size(), here.store(), 20.0)
    transport = subject.loaded.backend.open(world, {})
    if isinstance(transport, StreamTransport):
        made: Endpoint = transport.pair("conformance", 1 - here.rank())
    else:
        made = transport.endpoint("conformance")
    yield made
    here.meet("over")
    made.close()
    transport.close()


def filled(value: int, nbytes: int = LARGE) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def finish(on: Endpoint, works: list[Any]) -> None:
    """Wait for each work once."""
    for work in works:
        on.wait(work)


def post_first(subject: Subject) -> int:
    with endpoint(subject) as on:
        peer = 1 - here.rank()
        source, target = filled(here.rank() + 1), filled(0)
        send = on.isend(source, peer, 0)
        here.meet("both have posted a send, and no receive")
        receive = on.irecv(target, peer, 0)
        finish(on, [receive, send])
        return int(target[-1])


@rule(Level.L2, "native-post", UNBLOCKED_POSTS, HOST)
def native_post(lab: Lab) -> None:
    """Both ranks post a send of 1 MiB before either posts a receive."""
    assert lab.run(post_first, 2) == [2, 1]


def in_order(subject: Subject) -> list[int]:
    with endpoint(subject) as on:
        peer = 1 - here.rank()
        if here.rank() == 0:
            sources = [filled(n, LARGE >> (n % 3)) for n in range(4)]
            finish(on, [on.isend(source, peer, 7) for source in sources])
            return []
        targets = [filled(99, LARGE >> (n % 3)) for n in range(4)]
        finish(on, [on.irecv(target, peer, 7) for target in targets])
        return [int(target.max()) for target in targets]


@rule(Level.L2, "native-order", PER_TAG, SEVERAL_OUTSTANDING, HOST)
def native_order(lab: Lab) -> None:
    """Four outstanding messages of different sizes and one tag."""
    assert lab.run(in_order, 2)[1] == [0, 1, 2, 3], "messages of one tag overtook each other"


def across_tags(subject: Subject) -> list[int]:
    with endpoint(subject) as on:
        peer = 1 - here.rank()
        if here.rank() == 0:
            sources = [filled(tag) for tag in (1, 2, 3)]
            works = [on.isend(source, peer, int(source[0])) for source in sources]
            finish(on, works[::-1])
            return []
        targets = {tag: filled(0) for tag in (3, 2, 1)}
        for tag, target in targets.items():
            on.wait(on.irecv(target, peer, tag))
        return [int(targets[tag][-1]) for tag in (1, 2, 3)]


@rule(Level.L2, "native-tags", TAGS, UNBLOCKED_POSTS, SEVERAL_OUTSTANDING, HOST)
def native_tags(lab: Lab) -> None:
    """Three messages are received in the reverse order of their posts, by tag."""
    assert lab.run(across_tags, 2)[1] == [1, 2, 3], "a receive took the message of another tag"


def poll_before_peer(subject: Subject) -> tuple[bool, bool]:
    with endpoint(subject) as on:
        if here.rank() == 0:
            target = filled(0)
            receive = on.irecv(target, 1, 0)
            early = on.poll(receive)
            here.meet("receive looked at")
            until(lambda: on.poll(receive))
            return early, int(target.min()) == 5
        here.meet("receive looked at")
        source = filled(5)
        send = on.isend(source, 0, 0)
        until(lambda: on.poll(send))
        return False, True


@rule(Level.L2, "native-poll", EXACT_POLL, UNBLOCKED_POSTS, HOST)
def native_poll(lab: Lab) -> None:
    """A receive is polled before the send exists, then both until complete, without a wait."""
    for early, right in lab.run(poll_before_peer, 2):
        assert not early, "complete before the peer has sent anything"
        assert right, "the poll says complete, and the bytes are not there"


def waits_twice(subject: Subject) -> int:
    with endpoint(subject) as on:
        peer = 1 - here.rank()
        source, target = filled(3), filled(0)
        if here.rank() == 0:
            works = [on.isend(source, peer, 0), on.irecv(target, peer, 1)]
        else:
            works = [on.irecv(target, peer, 0), on.isend(source, peer, 1)]
        for work in (*works, *works):
            on.wait(work)
        return int(target[-1])


@rule(Level.L2, "native-wait-again", REPEATABLE, UNBLOCKED_POSTS, HOST)
def native_wait_again(lab: Lab) -> None:
    """A send and a receive are each waited twice."""
    assert lab.run(waits_twice, 2) == [3, 3]


def eager(subject: Subject) -> int:
    with endpoint(subject) as on:
        nbytes = subject.semantics.p2p.eager_bytes
        if here.rank() == 0:
            source = filled(4, nbytes)
            on.wait(on.isend(source, 1, 0))
            here.meet("sent")
            return nbytes
        here.meet("sent")
        target = filled(0, nbytes)
        on.wait(on.irecv(target, 0, 0))
        return int(target[-1])


@rule(Level.L2, "native-eager", EAGER, HOST)
def native_eager(lab: Lab) -> None:
    """A send of `eager_bytes` is waited for before the receive is posted."""
    assert lab.run(eager, 2)[1] == 4
