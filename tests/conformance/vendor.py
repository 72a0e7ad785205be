"""Backends as a vendor might bring them, right and wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import msgspec
from commlayer_gloo import GlooBackend

from commlayer.backend import Backend, Endpoint, Transport, Viability, World
from commlayer.conformance import Subject
from commlayer.semantics import Poll, Semantics, WaitBlocks
from commlayer.sim.profiles import GLOO, MPI, Profile
from commlayer.streams.backend import StreamBackend
from commlayer.streams.device import DeviceRuntime


class Declared(Backend):
    """Facts without a transport."""

    name: ClassVar[str] = "declared"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    semantics: ClassVar[Semantics] = GLOO.semantics

    def viability(self) -> Viability:
        return Viability(False, "there is no such hardware here", "buy it")

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        raise AssertionError("it is not viable")


class Wrong(Declared):
    """Wrong in four ways that show without sending anything."""

    name = "wrong"
    sources: ClassVar[Mapping[str, str]] = {"p2p.pol": "a typing error"}
    semantics = msgspec.structs.replace(
        GLOO.semantics,
        p2p=msgspec.structs.replace(GLOO.semantics.p2p, eager_bytes=-1),
    )

    def viability(self) -> Viability:
        return Viability(False, "")

    def open(self, setting: World, options: Mapping[str, Any]) -> Transport:  # type: ignore[override]
        raise AssertionError("it is not viable")


class ExactPoll(Declared):
    """A transport that is driven by polling."""

    name = "exact_poll"
    semantics = MPI.semantics


class EarlyPoll(Subject):
    """Plays the declared facts, but for a poll that may be early."""

    def profile(self) -> Profile:
        p2p = msgspec.structs.replace(self.semantics.p2p, poll=Poll.MAY_BE_EARLY)
        return replace(
            super().profile(), semantics=msgspec.structs.replace(self.semantics, p2p=p2p)
        )


class _ReturnsEarly(Endpoint):
    def __init__(self, inner: Endpoint) -> None:
        self._inner = inner
        self._works: list[Any] = []

    def isend(self, tensor: Any, dst: int, tag: int) -> Any:
        work = self._inner.isend(tensor, dst, tag)
        self._works.append(work)
        return work

    def irecv(self, tensor: Any, src: int, tag: int) -> Any:
        return self._inner.irecv(tensor, src, tag)

    def wait(self, work: Any) -> None:
        if not any(work is send for send in self._works):
            self._inner.wait(work)

    def close(self) -> None:
        self._inner.close()


class _EarlyTransport(Transport):
    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def endpoint(self, name: str) -> Endpoint:
        return _ReturnsEarly(self._inner.endpoint(name))


class EarlySends(GlooBackend):
    """Real gloo, whose wait of a send returns at once."""

    name: ClassVar[str] = "early_sends"

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        return _EarlyTransport(super().open(world, options))


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
