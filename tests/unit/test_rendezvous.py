"""Who connects with whom, and what ranks that disagree are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from commlayer_testkit.local import (
    SERIALIZED,
    WAITED,
    Hub,
    LocalBackend,
    MemoryStore,
    connect_rank,
    eventually,
    on_every_rank,
)
from msgspec.structs import replace

from commlayer.backend import World
from commlayer.bootstrap.cards import Card, encode
from commlayer.bootstrap.hello import Hello, agree
from commlayer.bootstrap.launch import Generation, launched_generation
from commlayer.bootstrap.rendezvous import Rendezvous
from commlayer.bootstrap.worlds import world_of_environment, world_of_group, world_of_job
from commlayer.config import CommConfig
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.semantics import Completion

LIMIT = 20.0
SHORT = 0.3

HELLO = Hello(
    wire_version=2,
    backend="local",
    channels=("data",),
    inline_bytes=64,
    allow_pickle=False,
    facts=WAITED,
    headers_ahead=2,
    payloads_ahead=6,
    version="1.0",
    host="here",
    pid=1,
)


def outcomes(*hellos: Hello) -> list[Any]:
    """What each rank learns from the hellos of all."""
    said = [hello.encode() for hello in hellos]

    def outcome(rank: int) -> CommError | None:
        try:
            agree(rank, hellos[rank], said)
        except CommError as error:
            return error
        return None

    return [outcome(rank) for rank in range(len(hellos))]


def test_equal_ranks_agree_wherever_they_run() -> None:
    assert outcomes(HELLO, replace(HELLO, host="there", pid=2, version="1.1")) == [None, None]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"inline_bytes": 65}, ["inline_bytes", "64", "65"]),
        ({"wire_version": 3}, ["wire_version", "2", "3"]),
        ({"backend": "other"}, ["backend", "'local'", "'other'"]),
        ({"allow_pickle": True}, ["allow_pickle", "False", "True"]),
        ({"channels": ("data", "x")}, ["channels", "('data',)", "('data', 'x')"]),
        ({"facts": SERIALIZED}, ["facts.p2p.poll", "never_before_wait", "exact"]),
        (
            {"facts": replace(WAITED, p2p=replace(WAITED.p2p, completion=Completion.LOCAL))},
            ["facts.p2p.completion", "matched", "local"],
        ),
    ],
)
def test_what_differs_is_named_on_both_ranks_with_both_values(
    changed: dict[str, Any], named: list[str]
) -> None:
    for error in outcomes(HELLO, replace(HELLO, host="there", pid=2, **changed)):
        assert error.kind is ErrorKind.CONFIG
        for text in (*named, "rank 0", "rank 1", "pid 1 on here", "pid 2 on there"):
            assert text in str(error)


def test_the_rank_that_differs_is_found_among_several() -> None:
    errors = outcomes(HELLO, HELLO, replace(HELLO, inline_bytes=1))
    assert all("rank 2" in str(error) for error in errors)


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"wire_version": 1})])
def test_a_hello_of_another_kind_of_version_is_an_error_that_names_the_rank(data: bytes) -> None:
    with pytest.raises(CommError, match=r"rank 1 .* greet each other differently"):
        agree(0, HELLO, [HELLO.encode(), data])


def test_a_rank_of_the_version_before_is_refused_naming_both_hosts_and_versions() -> None:
    """Wire version 1 said this hello; a build of it was also tried by hand."""
    before = msgspec.structs.asdict(replace(HELLO, wire_version=1, host="elsewhere", pid=7))
    del before["headers_ahead"], before["payloads_ahead"], before["contact"]
    with pytest.raises(CommError) as caught:
        agree(0, HELLO, [HELLO.encode(), msgspec.msgpack.encode(before)])
    assert caught.value.kind is ErrorKind.CONFIG
    for fact in ("pid 1 on here", "pid 7 on elsewhere", "wire version 1", "wire version 2"):
        assert fact in str(caught.value)


# -- the rendezvous: whom a rank takes for one of its own -----------------------------


class Comers:
    """Ranks that come to one store; each call of `come` is one `connect`."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self._pool = ThreadPoolExecutor(16)

    def come(
        self,
        rank: int,
        size: int = 2,
        *,
        says: str = "",
        limit: float = LIMIT,
        generation: int | None = None,
        then: Callable[[Rendezvous], Any] = lambda rendezvous: None,
    ) -> Any:
        """A future of what all ranks said, or of the error."""
        text = says or f"rank {rank}"
        attempt = Generation() if generation is None else Generation(generation, strict=True)

        def connect() -> list[str]:
            with Rendezvous(World(rank, size, self.store, limit), attempt) as rendezvous:
                said = rendezvous.meet(text.encode())
                then(rendezvous)
                return [each.decode() for each in said]

        return self._pool.submit(connect)

    def await_answer(self, rank: int) -> None:
        """Wait until `rank` has answered rank 0's card."""
        card = f"card/{rank}"
        decode = msgspec.msgpack.Decoder(Card).decode
        assert eventually(
            lambda: self.store.check([card]) and bool(decode(self.store.get(card)).answers)
        )

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def comers() -> Any:
    made = Comers()
    yield made
    made.close()


def outcome(future: Any) -> CommError:
    error = future.exception(LIMIT * 2)
    assert isinstance(error, CommError), error
    return error


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_hear_what_all_ranks_say(comers: Comers, size: int) -> None:
    futures = [comers.come(rank, size) for rank in reversed(range(size))]
    for future in futures:
        assert future.result(LIMIT) == [f"rank {rank}" for rank in range(size)]


def test_calls_under_one_name_are_paired_one_after_another(comers: Comers) -> None:
    for attempt in range(20):
        futures = [comers.come(rank, 3, says=f"{attempt}") for rank in range(3)]
        assert [future.result(LIMIT) for future in futures] == [[f"{attempt}"] * 3] * 3


def test_every_meeting_has_keys_of_its_own(comers: Comers) -> None:
    for _ in range(2):
        used = []

        def note(rendezvous: Rendezvous, used: list[bool] = used) -> None:
            used.append(rendezvous.world.store.check(["key"]))
            if rendezvous.world.rank:
                rendezvous.world.store.set("key", b"value")
                assert rendezvous.world.store.get("key") == b"value"

        for rank in (1, 0):
            comers.come(rank, 1, then=note).result(LIMIT)
        assert used == [False, False]


def dead(rank: int, leader: bytes = b"", **changed: Any) -> bytes:
    """The card of a process that was killed while it connected, or after."""
    card = Card.of(2, Generation())
    said = f"dead rank {rank}".encode()
    return encode(replace(card, pid=1, hello=said, answers=leader, **changed))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("had", ["rank 0", "rank 1", "both", "met", "failed"])
def test_nothing_of_a_dead_attempt_is_believed(comers: Comers, had: str, first: int) -> None:
    zero = dead(0)
    nonce = msgspec.msgpack.decode(zero, type=Card).nonce
    cards = [zero, dead(1, nonce)]
    if had in ("rank 0", "both", "met", "failed"):
        comers.store.set("card/0", cards[0])
    if had in ("rank 1", "both", "met", "failed"):
        comers.store.set("card/1", cards[1])
    if had in ("met", "failed"):
        roster = [msgspec.msgpack.decode(card, type=Card) for card in cards]
        comers.store.set(f"roster/{nonce.hex()}", encode(roster))
        comers.store.set(f"seen/{nonce.hex()}", encode([roster[1].nonce]))
    if had == "failed":
        failure = {"rank": 1, "who": "it", "kind": "config", "cause": "old", "cure": ""}
        comers.store.set(f"failure/{nonce.hex()}", msgspec.msgpack.encode(failure))
    futures = {first: comers.come(first)}
    if first:
        answered = lambda: msgspec.msgpack.decode(comers.store.get("card/1"), type=Card)  # noqa: E731
        mine = lambda: comers.store.check(["card/1"]) and answered().hello == b"rank 1"  # noqa: E731
        assert eventually(mine)
    futures[1 - first] = comers.come(1 - first)
    for future in futures.values():
        assert future.result(LIMIT) == ["rank 0", "rank 1"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_replaced_rank_meets_the_survivors(comers: Comers, lost: int) -> None:
    """Whoever is lost, and whoever comes back first."""
    for future in [comers.come(rank, 3) for rank in range(3)]:
        future.result(LIMIT)
    for order in ([lost, *{0, 1, 2} - {lost}], [*{0, 1, 2} - {lost}, lost]):
        futures = [comers.come(rank, 3, says=f"again {rank}") for rank in order]
        for future in futures:
            assert future.result(LIMIT) == ["again 0", "again 1", "again 2"]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_was_late_once_is_met_by_the_next_try(comers: Comers, late: int) -> None:
    assert isinstance(outcome(comers.come(1 - late, limit=SHORT)), CommTimeout)
    first = comers.come(late, says="late")
    second = comers.come(1 - late, says="again")
    assert sorted(first.result(LIMIT)) == sorted(second.result(LIMIT)) == ["again", "late"]


def test_absent_ranks_are_named_by_all_that_came(comers: Comers) -> None:
    futures = [comers.come(rank, 5, limit=SHORT * 4) for rank in (0, 2, 4)]
    for future in futures:
        error = outcome(future)
        assert isinstance(error, CommTimeout)
        assert "rank 1, 3 of 5 did not connect" in str(error)


def test_an_absent_rank_0_is_named(comers: Comers) -> None:
    error = outcome(comers.come(1, 3, limit=SHORT))
    assert isinstance(error, CommTimeout)
    assert f"rank 0 of 3 did not connect within {SHORT:g} s" in str(error)


def test_an_entry_of_rank_0_without_rank_0_does_not_count(comers: Comers) -> None:
    comers.store.set("card/0", dead(0))
    error = outcome(comers.come(1, limit=SHORT))
    assert isinstance(error, CommTimeout)
    assert "rank 0 of 2 did not connect" in str(error)
    assert "pid 1 on" in str(error)


def test_two_processes_of_one_rank_are_both_told(comers: Comers) -> None:
    first = comers.come(1)
    assert eventually(lambda: comers.store.check(["card/1"]))
    second = comers.come(1)
    for error in (outcome(first), outcome(second)):
        assert error.kind is ErrorKind.CONFIG
        assert "two processes connect as rank 1: pid " in str(error)


def test_all_ranks_are_told_of_two_processes_of_one_rank(comers: Comers) -> None:
    """While they wait for rank 2: both, and rank 0."""
    futures = [comers.come(0, 3), comers.come(1, 3)]
    comers.await_answer(1)
    futures.append(comers.come(1, 3))
    for error in map(outcome, futures):
        assert error.kind is ErrorKind.CONFIG
        assert "two processes connect as rank 1" in str(error)


def test_a_second_process_that_comes_late_is_told_who_was_first(comers: Comers) -> None:
    comers.store.set("card/0", encode(zero := Card.of(2, Generation())))
    other = replace(Card.of(2, Generation()), pid=77, host="there")
    comers.store.set(f"roster/{zero.nonce.hex()}", encode([zero, other]))
    error = outcome(comers.come(1, limit=SHORT))
    assert isinstance(error, CommTimeout)
    assert "another process (pid 77 on there) has connected as rank 1" in str(error)


@pytest.mark.parametrize("sizes", [(2, 3, 3), (3, 2), (3, 3, 4), (2, 3)])
def test_all_ranks_are_told_of_worlds_that_differ(comers: Comers, sizes: tuple[int, ...]) -> None:
    """Rank 0 at once, and all others at once or, where they come after it has left, in the end."""
    futures = [comers.come(rank, size, limit=3.0) for rank, size in enumerate(sizes)]
    errors = [outcome(future) for future in futures]
    assert errors[0].kind is ErrorKind.CONFIG
    for error in errors:
        assert f"WORLD_SIZE {sizes[-1]} and {sizes[0]}" in str(error)


def test_a_rank_beyond_a_world_that_has_met_is_told_of_its_size(comers: Comers) -> None:
    for future in [comers.come(0), comers.come(1)]:
        future.result(LIMIT)
    error = outcome(comers.come(2, 3, limit=SHORT))
    assert "rank 0 of 3 did not connect" in str(error)
    assert "is of a world of 2 ranks (WORLD_SIZE)" in str(error)


def test_a_rank_of_an_older_generation_is_told_and_the_others_wait_on(comers: Comers) -> None:
    futures = [comers.come(0, 3, generation=2), comers.come(1, 3, generation=2)]
    error = outcome(comers.come(2, 3, generation=1))
    assert error.kind is ErrorKind.CONFIG
    assert "rank 2 (pid" in str(error)
    assert "as generation 1, and rank 0" in str(error)
    assert "as generation 2" in str(error)
    futures.append(comers.come(2, 3, generation=2))
    for future in futures:
        assert future.result(LIMIT) == ["rank 0", "rank 1", "rank 2"]


def test_a_rank_0_that_is_outdated_is_told_and_the_newer_rank_waits_for_another(
    comers: Comers,
) -> None:
    old = [comers.come(0, 3, generation=1), comers.come(1, 3, generation=1)]
    comers.await_answer(1)  # once rank 0 has given up, nobody would tell one that comes
    new = comers.come(2, 3, generation=2)
    for error in map(outcome, old):
        assert error.kind is ErrorKind.CONFIG
        assert "rank 2 (pid" in str(error)
        assert "as generation 2, and rank 0" in str(error)
    again = [comers.come(rank, 3, generation=2) for rank in (0, 1)]
    for future in [new, *again]:
        assert future.result(LIMIT) == ["rank 0", "rank 1", "rank 2"]


def test_a_generation_that_stays_behind_is_named_at_the_limit(comers: Comers) -> None:
    behind = comers.come(0, generation=0, limit=SHORT)
    outcome(behind)
    error = outcome(comers.come(1, generation=1, limit=SHORT))
    assert isinstance(error, CommTimeout)
    assert "rank 0 of 2 did not connect" in str(error)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Generation(0, False)),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, Generation(3, True)),
        ({"TORCHELASTIC_RESTART_COUNT": "3", "GROUP_WORLD_SIZE": "1"}, Generation(3, True)),
        ({"TORCHELASTIC_RESTART_COUNT": "3", "GROUP_WORLD_SIZE": "2"}, Generation(3, False)),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, Generation(0, False)),
    ],
)
def test_the_launcher_counts_generations(
    environment: dict[str, str], expected: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents of several hosts count apart: their counts are no generation of all."""
    for variable in ("TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert launched_generation() == expected


def failing(error: BaseException) -> Callable[[Rendezvous], Any]:
    def fail(rendezvous: Rendezvous) -> None:
        raise error

    return fail


def watching(rendezvous: Rendezvous) -> None:
    for _ in range(3000):
        rendezvous.watch()
        time.sleep(0.01)


def test_what_a_rank_fails_of_after_all_have_met_is_told_to_all(comers: Comers) -> None:
    cause = CommError(ErrorKind.CONFIG, "connect", "it has no network", "Plug it in")
    futures = [comers.come(rank, 3, then=watching) for rank in (0, 1)]
    assert outcome(comers.come(2, 3, then=failing(cause))) is cause
    for error in map(outcome, futures):
        assert error.kind is ErrorKind.CONFIG
        assert "rank 2 (pid" in str(error)
        assert "it has no network. Plug it in" in str(error)


class DyingStore(MemoryStore):
    """A store whose server ends once it holds a key that begins so."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def check(self, keys: list[str]) -> bool:
        if any(each.startswith(self._key) for each in self.items):
            raise dist.DistNetworkError("Broken pipe\nframe #0: somewhere")
        return super().check(keys)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_ends_is_named(comers: Comers, rank: int) -> None:
    comers.store = DyingStore(f"card/{rank}")
    error = outcome(comers.come(rank))
    assert error.kind is ErrorKind.PEER_LOST
    assert "the store of the ranks does not answer any more (Broken pipe): rank 0" in str(error)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([{"inline_bytes": 100}, {"inline_bytes": 200}], "inline_bytes: (100|200) and (100|200)"),
        ([{}, {"allow_pickle": True}], "allow_pickle"),
        ([{}, {"channels": ("extra",)}], "channels"),
        ([{}, {"semantics": SERIALIZED}], r"facts\.p2p\.poll"),
    ],
)
def test_ranks_that_disagree_do_not_connect(settings: list[Any], named: str) -> None:
    hub = Hub(2)

    def body(rank: int) -> None:
        with pytest.raises(CommError, match=named) as caught:
            connect_rank(hub, rank, **settings[rank])
        assert caught.value.kind is ErrorKind.CONFIG

    on_every_rank(hub, body)
    assert hub.posted.total() == 0


def test_the_order_in_which_channels_are_named_does_not_matter() -> None:
    hub = Hub(2)
    names = [("x", "y"), ("y", "x")]

    def body(rank: int) -> Any:
        with connect_rank(hub, rank, channels=names[rank]) as comm:
            comm.channel("x").isend_object(f"x of {rank}", 1 - rank)
            comm.channel("y").isend_object(f"y of {rank}", 1 - rank)
            return comm.channel("y").recv_object(1 - rank), comm.channel("x").recv_object(1 - rank)

    assert on_every_rank(hub, body) == [("y of 1", "x of 1"), ("y of 0", "x of 0")]


ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"RANK": None}, "RANK not set"),
        ({"RANK": None, "MASTER_PORT": None}, "RANK, MASTER_PORT not set"),
        ({"RANK": "one"}, "RANK = 'one' is not a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE = '' is not a number"),
        ({"RANK": "2"}, "RANK = 2 is not in a world of 2"),
        ({"RANK": "-1"}, "RANK = -1 is not in a world of 2"),
        ({"WORLD_SIZE": "0"}, "not in a world of 0"),
    ],
)
def test_an_unusable_environment_is_named(
    changed: dict[str, str | None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (ENVIRONMENT | changed).items():
        if value is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, value)
    with pytest.raises(CommError, match=named) as caught:
        world_of_environment(CommConfig())
    assert caught.value.kind is ErrorKind.CONFIG


def test_a_group_needs_torch_distributed() -> None:
    with pytest.raises(CommError, match=r"not initialised.*init_process_group"):
        world_of_group(CommConfig(), None)


class LaunchedBackend(LocalBackend):
    """A backend whose own launcher started one job, or none."""

    def __init__(self, job: World | None) -> None:
        super().__init__(Hub(2), WAITED)
        self._job = job

    def job(self, connect_timeout: float) -> World | None:
        return self._job


def test_the_job_of_the_backend_counts_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    store: Any = dist.HashStore()
    backend = LaunchedBackend(World(1, 3, store, 5.0))
    first, other = (
        world_of_job(CommConfig(name=name, connect_timeout=7.0), backend) for name in ("x", "y")
    )
    assert (first.rank, first.size, first.connect_timeout) == (1, 3, 7.0)
    first.store.set("key", b"first")
    assert not other.store.check(["key"])


def test_the_environment_counts_where_the_backend_has_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CommError, match=r"RANK.* not set"):
        world_of_job(CommConfig(), LaunchedBackend(None))
    with pytest.raises(CommError, match=r"RANK.* not set"):
        world_of_job(CommConfig(), LocalBackend(Hub(2), WAITED))


def test_torch_distributed_counts_before_the_job_of_the_backend() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = world_of_job(CommConfig(), LaunchedBackend(World(1, 3, MemoryStore(), 5.0)))
        assert (world.rank, world.size) == (0, 1)
    finally:
        dist.destroy_process_group()
