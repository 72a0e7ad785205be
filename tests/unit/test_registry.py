"""Backends and hooks that live in the process, without an installed distribution."""

from __future__ import annotations

import pytest

from commlayer.backend import PLUGIN_API, Backend, Viability
from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.hooks import hookimpl
from commlayer.loading import LoadedBackend
from commlayer.registry import Registry, default_registry
from commlayer.semantics import Semantics


class Example(Backend):
    name = "example"
    plugin_api = (PLUGIN_API, PLUGIN_API)
    semantics = Semantics()

    def viability(self):
        return Viability(True, "always")

    def open(self, world, options):
        raise NotImplementedError


class Engine:
    """Hook implementations that answer with a value of their own."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    @hookimpl
    def commlayer_retention_policy(self, semantics, config):
        return self.answer

    @hookimpl
    def commlayer_configure(self, config):
        return self.answer


@pytest.fixture
def registry():
    return Registry(entry_points=[])


def retention(registry: Registry, selected: LoadedBackend | None = None) -> object:
    return registry.hooks(selected).commlayer_retention_policy(
        semantics=Semantics(), config=CommConfig()
    )


def test_added_backend_is_listed_loaded_and_selected(registry):
    backend = Example()
    registry.add_backend(backend)
    assert registry.names() == ["example"]
    assert registry.load("example").backend is backend
    assert registry.select("auto").backend is backend
    (entry,) = registry.survey()
    assert (entry.distribution, entry.viable) == ("this process", True)


def test_registries_do_not_share_backends(registry):
    registry.add_backend(Example())
    assert Registry(entry_points=[]).names() == []
    assert default_registry() is default_registry()


def test_two_added_backends_of_one_name_are_ambiguous(registry):
    registry.add_backend(Example())
    registry.add_backend(Example())
    with pytest.raises(CommError, match="2 distributions claim the name") as caught:
        registry.select("example")
    assert caught.value.kind is ErrorKind.PLUGIN


@pytest.mark.parametrize(
    ("attribute", "value", "cause"),
    [
        ("name", "", "named ''"),
        ("name", "auto", "calls its backend 'auto'"),
        ("plugin_api", (0, 0), "plugin API 0"),
        ("semantics", None, "semantics None"),
        ("priority", None, "priority None"),
    ],
)
def test_added_backend_passes_the_same_checks(registry, attribute, value, cause):
    broken = type("Broken", (Example,), {attribute: value})()
    with pytest.raises(CommError, match="load backend") as caught:
        registry.add_backend(broken)
    assert cause in caught.value.cause
    assert registry.names() == []


def test_something_that_is_no_backend_is_refused(registry):
    with pytest.raises(CommError, match=r"not a commlayer\.backend\.Backend"):
        registry.add_backend(object())


def test_no_engine_no_answer(registry):
    assert retention(registry) is None


def test_the_latest_engine_answers_first(registry):
    first, second = Engine("first"), Engine("second")
    registry.register(first)
    registry.register(second)
    registry.register(second)
    assert retention(registry) == "second"
    registry.unregister(second)
    assert retention(registry) == "first"
    registry.unregister(second)
    assert retention(registry) == "first"


def test_an_engine_answers_before_the_selected_plugin(registry):
    selected = LoadedBackend(Example(), "acme", "1.0", Engine("plugin"))
    assert retention(registry, selected) == "plugin"
    assert retention(registry) is None
    engine = Engine("engine")
    registry.register(engine)
    assert retention(registry, selected) == "engine"
    engine.answer = None
    assert retention(registry, selected) == "plugin"


def test_the_selected_plugin_may_be_an_engine_too(registry):
    both = Engine("both")
    registry.register(both)
    assert retention(registry, LoadedBackend(Example(), "acme", "1.0", both)) == "both"


def test_a_hook_with_unknown_arguments_is_refused(registry):
    class Odd:
        @hookimpl
        def commlayer_configure(self, surprise):
            return None

    with pytest.raises(CommError, match="surprise") as caught:
        registry.register(Odd())
    assert caught.value.kind is ErrorKind.PLUGIN
    assert registry.hooks().commlayer_configure(config=CommConfig()) is None
