"""L0: what can be seen without sending anything."""

from __future__ import annotations

import inspect
import time

import msgspec
from torch._C._distributed_c10d import HashStore

from commlayer.backend import PLUGIN_API, Backend
from commlayer.backend import World as BackendWorld
from commlayer.device.backend import StreamBackend
from commlayer.errors import CommError, ErrorKind
from commlayer.semantics import (
    DroppedWork,
    OperationSemantics,
    Order,
    Progress,
    Semantics,
    SourceLifetime,
    Threads,
    WaitBlocks,
)
from commlayer_testkit.conformance.lab import Lab
from commlayer_testkit.conformance.rules import Level, rule
from commlayer_testkit.conformance.verdict import CannotRun

_CHEAP_SECONDS = 5.0


@rule(Level.L0, "named")
def named(lab: Lab) -> None:
    """Loads the backend and compares name and plugin API."""
    loaded = lab.subject.loaded
    backend = loaded.backend
    assert backend.name == lab.subject.name
    low, high = backend.plugin_api
    assert low <= PLUGIN_API <= high, f"plugin API {low} to {high}, and this is {PLUGIN_API}"
    lab.evidence["origin"] = loaded.origin


@rule(Level.L0, "interface")
def interface(lab: Lab) -> None:
    """Compares the parameters of each overridden method with the interface's."""
    backend = lab.subject.loaded.backend
    base = StreamBackend if isinstance(backend, StreamBackend) else Backend
    compared = 0
    for name, declared in inspect.getmembers(base, inspect.isfunction):
        if name.startswith("_"):
            continue
        wanted = _parameters(declared)[1:]
        found = _parameters(getattr(type(backend), name))[1:]
        assert found == wanted, f"{name}({', '.join(found)}) should be {name}({', '.join(wanted)})"
        compared += 1
    lab.evidence["methods"] = compared


def _parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


@rule(Level.L0, "viability")
def viability(lab: Lab) -> None:
    """Asks twice, on the clock."""
    began = time.monotonic()
    backend = lab.subject.loaded.backend
    first, second = backend.viability(), backend.viability()
    elapsed = time.monotonic() - began
    assert first == second, f"two answers: {first} and {second}"
    assert first.reason, "viability gives no reason"
    assert first.ok or first.install, "not viable, and nothing says what to install"
    assert elapsed < _CHEAP_SECONDS, f"two questions took {elapsed:.1f} s"
    lab.evidence.update(viable=first.ok, reason=first.reason)


@rule(Level.L0, "facts")
def facts(lab: Lab) -> None:
    """Writes and reads the facts, and looks for pairs that exclude each other."""
    semantics = lab.subject.semantics
    decoded = msgspec.convert(semantics.facts(), Semantics)
    assert decoded == semantics, "the facts change when they are written and read"
    contradictions = [
        f"{kind}: {text}"
        for kind in ("p2p", "collective")
        for text in _contradictions(getattr(semantics, kind))
    ]
    streamed = semantics.p2p.order is Order.IN_ORDER_STREAM
    if streamed and semantics.p2p.wait_blocks is not WaitBlocks.STREAM:
        contradictions.append("p2p: order is in_order_stream, and wait blocks the host")
    if streamed and semantics.progress is Progress.ONLY_IN_CALLS:
        contradictions.append("operations run on a stream, and nothing moves outside calls")
    if not semantics.devices:
        contradictions.append("devices is empty: it reads no memory at all")
    assert not contradictions, "; ".join(contradictions)


def _contradictions(facts: OperationSemantics) -> list[str]:
    found = []
    if facts.eager_bytes < 0 or facts.max_outstanding_per_pair < 0:
        found.append("eager_bytes and max_outstanding_per_pair must not be negative")
    if facts.source_lifetime is not SourceLifetime.REFERENCE and (
        facts.wait_blocks is WaitBlocks.HOST
    ):
        found.append("source_lifetime is a device's, and wait blocks the host")
    if facts.source_lifetime is SourceLifetime.RECORD_STREAM and (
        facts.dropped_work is DroppedWork.UNSAFE
    ):
        found.append("source_lifetime is record_stream, and dropped_work is unsafe")
    return found


@rule(Level.L0, "sources")
def sources(lab: Lab) -> None:
    """Looks every name up."""
    backend = lab.subject.loaded.backend
    known = set(Semantics.__struct_fields__)
    for kind in ("p2p", "collective"):
        known |= {f"{kind}.{fact}" for fact in OperationSemantics.__struct_fields__}
    unknown = sorted(set(backend.sources) - known)
    assert not unknown, f"sources of facts that do not exist: {', '.join(unknown)}"
    empty = sorted(name for name, text in backend.sources.items() if not text.strip())
    assert not empty, f"sources that say nothing: {', '.join(empty)}"
    for component, version in backend.versions().items():
        assert isinstance(component, str), f"versions(): {component!r}"
        assert isinstance(version, str), f"versions(): {component} is {version!r}"
    lab.evidence["sources"] = len(backend.sources)


@rule(Level.L0, "core-accepts")
def core_accepts(lab: Lab) -> None:
    """Connects a world of one simulated rank."""
    semantics = lab.subject.semantics
    device = isinstance(lab.subject.loaded.backend, StreamBackend)
    assert not (device and semantics.threads is Threads.FUNNELED), (
        "threads is funneled: device operations are posted on the threads that call"
    )
    lab.explore(lambda stage, rank: stage.connect(rank), 1, schedules=1)


@rule(Level.L0, "options-refused")
def options_refused(lab: Lab) -> None:
    """Opens the transport with an option that no backend has."""
    backend = lab.subject.loaded.backend
    if not lab.subject.loaded.viability().ok and not isinstance(backend, StreamBackend):
        raise CannotRun("not viable: it cannot be opened")
    world = BackendWorld(0, 1, HashStore(), 5.0)  # type: ignore[arg-type]
    try:
        backend.open(world, {"no such option": True})
    except CommError as error:
        if error.kind is ErrorKind.CONFIG:
            return
        raise
    raise AssertionError("an unknown option was accepted")
