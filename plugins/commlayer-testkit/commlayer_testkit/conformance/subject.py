"""The backend under test, as the worlds of the kit connect it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commlayer.backend import Backend
from commlayer.device.backend import StreamBackend
from commlayer.errors import CommError, ErrorKind
from commlayer.loading import LoadedBackend
from commlayer.registry import Registry, default_registry
from commlayer.semantics import Semantics
from commlayer_testkit.conformance.rules import Level, Rule, all_rules
from commlayer_testkit.hooks import KitHooks

if TYPE_CHECKING:
    from commlayer.communicator import Communicator
    from commlayer_testkit.sim.profiles import Profile
    from commlayer_testkit.sim.rank import Rank


@dataclass(frozen=True)
class Subject:
    """An installed backend by name, or a backend object.

    Ranks get it by pickling: the class of an object must be importable where
    ranks run.  A subclass may put something else in the place of the simulated
    transport (`profile`, `simulated`).
    """

    backend: str | Backend

    @functools.cached_property
    def registry(self) -> Registry:
        """The registry that knows the backend."""
        if isinstance(self.backend, str):
            return default_registry()
        registry = Registry(())
        registry.add_backend(self.backend)
        if isinstance(self.backend, StreamBackend):
            registry.add_backend(default_registry().load(self.backend.host).backend)
        return registry

    @property
    def name(self) -> str:
        """The name of the backend."""
        return self.backend if isinstance(self.backend, str) else self.backend.name

    @functools.cached_property
    def loaded(self) -> LoadedBackend:
        """The backend and where it comes from; raises `CommError` (PLUGIN) as `Registry.load`."""
        return self.registry.load(self.name)

    @property
    def semantics(self) -> Semantics:
        """The facts that the backend declares."""
        return self.loaded.backend.semantics

    def rules(self, up_to: Level = Level.L4) -> list[Rule]:
        """The kit's rules and, after them at each level, those that plugin and engines add.

        Raises `CommError` (PLUGIN) for what is no rule, and for an id that is taken.
        """
        rules = all_rules()
        hooks = self.registry.hooks(self.loaded, KitHooks)
        for added in hooks.commlayer_conformance_rules(semantics=self.semantics):
            for rule in added:
                if not isinstance(rule, Rule) or any(rule.id == known.id for known in rules):
                    raise CommError(
                        ErrorKind.PLUGIN,
                        f"conformance rules for backend {self.name!r}",
                        f"commlayer_conformance_rules() of {self.loaded.origin} or of an engine "
                        f"returned {rule.id if isinstance(rule, Rule) else rule!r}: "
                        "no rule, or an id that another rule has",
                        "Return `Rule` objects with clauses of your own",
                    )
                rules.append(rule)
        return sorted(filter(lambda r: up_to.includes(r.level), rules), key=lambda r: r.level.value)

    def connect(self, **settings: Any) -> Communicator:
        """Connect the calling rank over the real transport.

        Unless `settings` say otherwise, little travels inside headers, so that messages
        of moderate size have payload of their own.
        """
        import commlayer

        defaults = {
            "backend": self.name,
            "connect_timeout": 20.0,
            "close_timeout": 5.0,
            "inline_bytes": 8192,
        }
        return commlayer.connect({**defaults, **settings}, registry=self.registry)

    def rank_in_job(self) -> int:
        """The number of the calling process in the job of the backend's own launcher."""
        world = self.loaded.backend.job(20.0)
        assert world is not None, f"backend {self.name!r} finds no job of its launcher"
        return world.rank

    def profile(self) -> Profile:
        """What the simulator plays: the declared facts."""
        from commlayer_testkit.sim.profiles import Profile

        return Profile(self.name, self.semantics, "as declared")

    def simulated(self, rank: Rank) -> Backend:
        """The backend of a simulated rank, of the declared facts."""
        from commlayer_testkit.sim.mount_device import SimStreamBackend
        from commlayer_testkit.sim.transport import SimBackend

        made: Backend
        if isinstance(self.loaded.backend, StreamBackend):
            made = SimStreamBackend(rank, rank.world.profile)
        else:
            made = SimBackend(rank.world)
        made.semantics = self.semantics  # type: ignore[misc]
        return made

    def companion(self) -> Profile | None:
        """The transport that carries headers beside a device transport, as it is declared."""
        from commlayer_testkit.sim.profiles import Profile

        backend = self.loaded.backend
        if not isinstance(backend, StreamBackend):
            return None
        host = self.registry.load(backend.host).backend
        return Profile(host.name, host.semantics, "as declared")

    def __getstate__(self) -> dict[str, Any]:
        return {"backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
