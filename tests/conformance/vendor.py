"""Backends that only declare: facts without a transport."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from commlayer_testkit.conformance import Subject
from commlayer_testkit.sim.profiles import GLOO, Profile

from commlayer.backend import Backend, Transport, Viability, World
from commlayer.device.backend import StreamBackend
from commlayer.device.device import DeviceRuntime
from commlayer.semantics import Semantics, WaitBlocks


class Declared(Backend):
    """Facts without a transport."""

    name: ClassVar[str] = "declared"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    semantics: ClassVar[Semantics] = GLOO.semantics

    def viability(self) -> Viability:
        return Viability(False, "there is no such hardware here", "buy it")

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        raise AssertionError("it is not viable")


class DeclaredDevice(StreamBackend):
    """Facts of a device transport without a device."""

    name: ClassVar[str] = "declared_device"
    host: ClassVar[str] = "gloo"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)

    def viability(self) -> Viability:
        return Viability(False, "there is no such hardware here", "buy it")

    def device(self) -> DeviceRuntime:
        raise AssertionError("it is not viable")

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Any:
        raise AssertionError("it is not viable")


def of_profile(profile: Profile) -> Subject:
    """A subject that declares the facts of a profile."""
    streamed = profile.semantics.p2p.wait_blocks is WaitBlocks.STREAM
    backend: Backend = DeclaredDevice() if streamed else Declared()
    backend.semantics = profile.semantics  # type: ignore[misc]
    return Subject(backend)
