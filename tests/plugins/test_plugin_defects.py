"""What a plugin gets wrong after it was found: each names the distribution, and ends nothing."""

from __future__ import annotations

from typing import Any

import pytest
from commlayer_testkit.local import WAITED, Hub, LocalBackend, LocalTransport, connect_rank

from commlayer.backend import Transport
from commlayer.errors import CommError, ErrorKind
from commlayer.registry import Registry


def refused(registry: Registry, name: str) -> CommError:
    with pytest.raises(CommError) as caught:
        registry.load(name)
    assert caught.value.kind is ErrorKind.PLUGIN
    return caught.value


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ("Semantics(threads='multiple')", "threads = 'multiple'"),
        ("Semantics(p2p=OperationSemantics(poll='exact'))", "p2p.poll = 'exact'"),
        ("Semantics(collective=OperationSemantics(eager_bytes=True))", "collective.eager_bytes"),
        ("Semantics(devices='cpu')", "devices = 'cpu'"),
        ("Semantics(tags=1)", "tags = 1"),
        ("Semantics(p2p=None)", "p2p = None"),
    ],
)
def test_a_fact_of_another_type_is_refused_when_loading(site: Any, facts: str, named: str) -> None:
    source = site.plugin("typed").replace("semantics = Semantics()", f"semantics = {facts}")
    source = source.replace("import Semantics", "import OperationSemantics, Semantics")
    site.install("acme-typed", source, "typed")
    error = refused(Registry(), "typed")
    assert "acme-typed" in error.cause
    assert named in error.cause


def test_a_backend_named_auto_is_told_why_not(site: Any) -> None:
    site.install("acme-auto", site.plugin("auto"), "auto")
    assert "asks for the best one" in refused(Registry(), "auto").cause


def test_a_reversed_range_of_versions_is_told_so(site: Any) -> None:
    site.install("acme-range", site.plugin("range", plugin_api=(3, 1)), "range")
    assert "the lowest version comes first" in refused(Registry(), "range").cause


@pytest.mark.parametrize("raised", ["sys.exit(3)", "raise RuntimeError('no driver')"])
def test_a_viability_that_ends_the_process_does_not(site: Any, raised: str) -> None:
    viability = f"import sys; {raised}"
    site.install("acme-exit", site.plugin("exits", viability=viability), "exits")
    site.install("acme-fine", site.plugin("fine"), "fine")
    entries = {entry.name: entry for entry in Registry(site.entry_points()).survey()}
    assert entries["fine"].viable
    assert not entries["exits"].viable
    assert "viability() raised" in entries["exits"].reason


def test_escape_bytes_reach_no_terminal(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    viability = r"return Viability(False, 'no \x1b[31mred\x07')"
    site.install("acme-red", site.plugin("red", viability=viability), "red")
    site.metadata("acme-odd", "[commlayer.backends]\nod\x1bd = acme_red\n")
    (entry,) = Registry(site.entry_points()).survey()
    assert entry.reason == r"no \x1b[31mred\x07"
    assert "not printable" in caplog.text


class Defective(LocalBackend):
    """Gets one call wrong."""

    def __init__(self, wrong: str, answer: Any) -> None:
        super().__init__(Hub(1), WAITED)
        self._wrong, self._answer = wrong, answer

    def open(self, world: Any, options: Any) -> Transport:
        if self._wrong == "open":
            return self._said()  # type: ignore[no-any-return]
        backend = self

        class Opened(LocalTransport):
            def endpoint(self, name: str) -> Any:
                return backend._said()

        return Opened(self._hub, world.rank)

    def versions(self) -> Any:
        return self._said()

    def _said(self) -> Any:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


@pytest.mark.parametrize("wrong", ["open", "endpoint"])
@pytest.mark.parametrize("answer", [None, OSError("no such device")], ids=repr)
def test_what_opening_gets_wrong_is_named(wrong: str, answer: Any) -> None:
    registry = Registry(())
    registry.add_backend(Defective(wrong, answer))
    loaded = registry.load("local")
    with pytest.raises(CommError) as caught:
        loaded.endpoint(loaded.open(world(), {}), "p2p")
    assert caught.value.kind is ErrorKind.PLUGIN
    assert wrong in str(caught.value)
    assert "this process" in caught.value.cause


@pytest.mark.parametrize("wrong", ["open", "endpoint"])
@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_a_signal_handler_raises_while_a_plugin_waits_goes_through(
    wrong: str, raised: BaseException
) -> None:
    registry = Registry(())
    registry.add_backend(Defective(wrong, raised))
    loaded = registry.load("local")
    with pytest.raises(type(raised)):
        loaded.endpoint(loaded.open(world(), {}), "p2p")


def world() -> Any:
    class World:
        rank = 0

    return World()


def test_an_error_that_the_plugin_words_itself_goes_through() -> None:
    own = CommError(ErrorKind.CONFIG, "options", "unknown rail", "Name one")
    registry = Registry(())
    registry.add_backend(Defective("open", own))
    with pytest.raises(CommError, match="unknown rail"):
        registry.load("local").open(world(), {})


def test_versions_that_raise_are_told_and_raise_nothing() -> None:
    registry = Registry(())
    registry.add_backend(Defective("versions", OSError("no library")))
    assert registry.load("local").versions() == {"versions()": "raised OSError: no library"}


def test_connecting_names_the_plugin_that_cannot_open() -> None:
    class Broken(LocalBackend):
        def open(self, world: Any, options: Any) -> Transport:
            raise OSError("no such device")

    hub = Hub(1)
    with pytest.raises(CommError, match="OSError: no such device"):
        connect_rank(hub, 0, backend=Broken(hub, WAITED))
