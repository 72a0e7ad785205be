"""Mutants that show without sending anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from commlayer_gloo import GlooBackend
from commlayer_testkit.conformance import Subject
from commlayer_testkit.sim.profiles import GLOO, NCCL

from commlayer.backend import Backend, Transport, Viability, World
from commlayer.semantics import DroppedWork, Order, Semantics, SourceLifetime
from mutants.mutant import Mutant


def facts(base: Semantics, **p2p: Any) -> Semantics:
    """`base` with other facts of point-to-point operations."""
    return msgspec.structs.replace(base, p2p=msgspec.structs.replace(base.p2p, **p2p))


class Gloo(GlooBackend):
    """Gloo under the name of a mutant."""

    name: ClassVar[str] = "mutant"
    semantics: ClassVar[Semantics]

    def __init__(self, semantics: Semantics = GlooBackend.semantics) -> None:
        self.semantics = semantics  # type: ignore[misc]


class OtherPluginApi(Gloo):
    plugin_api: ClassVar[tuple[int, int]] = (2, 3)


class RenamedParameter(Gloo):
    def open(self, where: World, options: Mapping[str, Any]) -> Transport:  # type: ignore[override]
        return super().open(where, options)


class MissingParameter(Gloo):
    def job(self) -> World | None:  # type: ignore[override]
        return None


class ChangingViability(Gloo):
    answers = 0

    def viability(self) -> Viability:
        self.answers += 1
        return Viability(True, f"answer {self.answers}")


class SilentViability(Gloo):
    def viability(self) -> Viability:
        return Viability(True, "")


class NothingToInstall(Gloo):
    def viability(self) -> Viability:
        return Viability(False, "there is no such hardware here")


class RaisingViability(Gloo):
    def viability(self) -> Viability:
        raise OSError("no such device")


class SourceOfNoFact(Gloo):
    sources: ClassVar[Mapping[str, str]] = {"p2p.pol": "measured"}


class EmptySource(Gloo):
    sources: ClassVar[Mapping[str, str]] = {"p2p.poll": " "}


class VersionIsANumber(Gloo):
    def versions(self) -> Mapping[str, str]:
        return {"torch": 2}  # type: ignore[dict-item]


class AnyOption(Gloo):
    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        return super().open(world, {})


class OptionsKeyError(Gloo):
    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        for option in options:
            raise KeyError(option)
        return super().open(world, options)


_RECORDED_AND_UNSAFE = facts(NCCL.semantics, dropped_work=DroppedWork.UNSAFE)


def _mutant(name: str, breaks: str, backend: Backend, rule: str, says: str) -> Mutant:
    return Mutant(name, breaks, lambda: Subject(backend), (f"L0-{rule}",), says)


MUTANTS = (
    Mutant(
        "other-plugin-api", "written for a plugin API that does not exist yet",
        lambda: Subject(OtherPluginApi()), ("L0-named",), "was written for plugin API 2 to 3",
    ),
    _mutant("renamed-parameter", "a parameter of `open` has another name",
            RenamedParameter(), "interface", r"open\(where"),
    _mutant("missing-parameter", "`job` lacks its parameter", MissingParameter(), "interface",
            r"job\(\)"),
    _mutant("changing-viability", "`viability` answers otherwise each time", ChangingViability(),
            "viability", "two answers"),
    _mutant("silent-viability", "viable, and no reason is given", SilentViability(), "viability",
            "no reason"),
    _mutant("nothing-to-install", "not viable, and nothing says what to install",
            NothingToInstall(), "viability", "what to install"),
    _mutant("raising-viability", "`viability` raises", RaisingViability(), "viability",
            "no such device"),
    _mutant("negative-eager", "a negative `eager_bytes`", Gloo(facts(GLOO.semantics,
            eager_bytes=-1)), "facts", "must not be negative"),
    _mutant("stream-order-on-the-host", "operations run on a stream, and wait blocks the host",
            Gloo(facts(GLOO.semantics, order=Order.IN_ORDER_STREAM)), "facts", "wait blocks"),
    _mutant("device-lifetime-on-the-host", "an event keeps the source, and wait blocks the host",
            Gloo(facts(GLOO.semantics, source_lifetime=SourceLifetime.EVENT)), "facts",
            "source_lifetime"),
    _mutant("recorded-and-unsafe", "the stream is recorded, and a dropped work is unsafe",
            Gloo(_RECORDED_AND_UNSAFE), "facts", "dropped_work is unsafe"),
    _mutant("no-devices", "it reads no memory at all",
            Gloo(msgspec.structs.replace(GLOO.semantics, devices=())), "facts", "no memory"),
    _mutant("source-of-no-fact", "a source names a fact that does not exist", SourceOfNoFact(),
            "sources", "p2p.pol"),
    _mutant("empty-source", "a source says nothing", EmptySource(), "sources", "say nothing"),
    _mutant("version-is-a-number", "`versions` gives a number", VersionIsANumber(), "sources",
            "torch is 2"),
    _mutant("no-tags", "facts on which no lane can be built", Gloo(msgspec.structs.replace(
            GLOO.semantics, tags=False)), "core-accepts", "tags = False"),
    _mutant("any-option", "unknown options are accepted", AnyOption(), "options-refused",
            "was accepted"),
    _mutant("option-key-error", "an unknown option raises something else", OptionsKeyError(),
            "options-refused", "KeyError"),
)  # fmt: skip
