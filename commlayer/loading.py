"""From an entry point to a backend that was checked.

Everything that a plugin can get wrong is found here, and named with its distribution: what
it imports, what its hook returns, the facts it declares, and what its calls raise later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, get_origin, get_type_hints

import pluggy

from commlayer.backend import PLUGIN_API, Backend, Endpoint, Transport, Viability, World
from commlayer.errors import CommError, ErrorKind
from commlayer.hooks import PROJECT, Hooks
from commlayer.semantics import Semantics

AUTO = "auto"
"""The name that asks for the best backend."""


@dataclass(frozen=True)
class LoadedBackend:
    """A backend that passed every check, and where it came from.

    `plugin` is the module whose hooks count while the backend is in use, or
    ``None`` for a backend that was added in this process.
    """

    backend: Backend
    distribution: str
    version: str
    plugin: object | None = field(default=None, repr=False)

    @property
    def origin(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".rstrip()

    def viability(self) -> Viability:
        """The backend's own answer; one that raises or answers nonsense is not viable."""
        try:
            answer: object = self.backend.viability()
        except (Exception, SystemExit) as error:
            return Viability(False, f"viability() raised {describe(error)}")
        if not isinstance(answer, Viability):
            return Viability(False, f"viability() returned {answer!r}, not a Viability")
        return Viability(bool(answer.ok), printable(answer.reason), printable(answer.install))

    def versions(self) -> dict[str, str]:
        """The backend's own answer; one that raises says so in place of a version."""
        try:
            return {printable(k): printable(v) for k, v in self.backend.versions().items()}
        except (Exception, SystemExit) as error:
            return {"versions()": f"raised {describe(error)}"}

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        """The transport; raises `CommError` (PLUGIN) for what the plugin gets wrong.

        A `CommError` of the plugin's own goes through.
        """
        transport = self._called("open()", lambda: self.backend.open(world, options))
        if not isinstance(transport, Transport):
            raise self._defect("open()", f"returned {transport!r}, not a Transport")
        return transport

    def endpoint(self, transport: Transport, name: str) -> Endpoint:
        """The communicator `name` of `transport`; raises as `open`."""
        endpoint = self._called(f"endpoint({name!r})", lambda: transport.endpoint(name))
        if not isinstance(endpoint, Endpoint):
            raise self._defect(f"endpoint({name!r})", f"returned {endpoint!r}, not an Endpoint")
        return endpoint

    def _called(self, call: str, function: Callable[[], object]) -> object:
        try:
            return function()
        except CommError:
            raise
        except Exception as error:  # these calls wait: SystemExit is that of a signal handler
            raise self._defect(call, f"raised {describe(error)}") from error

    def _defect(self, call: str, cause: str) -> CommError:
        return CommError(
            ErrorKind.PLUGIN,
            f"{call} of backend {self.backend.name!r}",
            f"{self.origin}: it {cause}",
            "See the cause; if it is not the set-up of this host, it is a defect of the plugin",
        )


@dataclass(frozen=True)
class Provider:
    """One provider of a name: an entry point of a distribution, or a backend of this process."""

    name: str
    distribution: str
    version: str
    provider: EntryPoint | LoadedBackend

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def cure(self) -> str:
        return (
            f"Repair, upgrade or uninstall {self.distribution} "
            f"(this commlayer has plugin API {PLUGIN_API})"
        )

    def refuse(self, cause: str, cure: str = "") -> CommError:
        operation = f"load backend {self.name!r}"
        return CommError(ErrorKind.PLUGIN, operation, cause, cure or self.cure)


def plugin_manager(*specifications: type) -> pluggy.PluginManager:
    """A fresh plugin manager that knows the hook specifications."""
    manager = pluggy.PluginManager(PROJECT)
    for specification in (Hooks, *specifications):
        manager.add_hookspecs(specification)
    return manager


def load_plugin(claim: Provider, point: EntryPoint) -> LoadedBackend:
    where = f"{point.value} of {claim.origin}"
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:
        raise claim.refuse(f"importing {where} raised {describe(error)}") from error
    manager = plugin_manager()
    try:
        manager.register(plugin)
    except Exception as error:
        raise claim.refuse(f"{where} is not a usable plugin: {describe(error)}") from error
    if not manager.hook.commlayer_backend.get_hookimpls():
        raise claim.refuse(
            f"{where} has no hook implementation commlayer_backend()",
            f"Mark it with @commlayer.hookimpl, or uninstall {claim.distribution}",
        )
    try:
        answers = manager.hook.commlayer_backend()
    except (Exception, SystemExit) as error:
        raise claim.refuse(
            f"commlayer_backend() of {claim.origin} raised {describe(error)}"
        ) from error
    backend = checked(answers[0] if answers else None, claim)
    return LoadedBackend(backend, claim.distribution, claim.version, plugin)


def checked(backend: object, claim: Provider) -> Backend:
    """Return `backend`; raise unless it is a `Backend` of the claimed name for this plugin API."""
    if not isinstance(backend, Backend):
        raise claim.refuse(f"{claim.origin} provides {backend!r}, not a commlayer.backend.Backend")
    _check_plugin_api(getattr(backend, "plugin_api", None), claim)
    name: object = getattr(backend, "name", None)
    if name == AUTO:
        raise claim.refuse(
            f"{claim.origin} calls its backend {AUTO!r}, which asks for the best one",
            f"Give it another name in {claim.distribution}",
        )
    if name != claim.name or name == "":
        raise claim.refuse(
            f"{claim.origin} provides a backend named {name!r} under the name {claim.name!r}"
        )
    semantics: object = getattr(backend, "semantics", None)
    if not isinstance(semantics, Semantics):
        raise claim.refuse(
            f"{claim.origin} declares semantics {semantics!r}, not a commlayer.semantics.Semantics"
        )
    _check_facts(semantics, claim)
    priority: object = backend.priority
    if not isinstance(priority, int):
        raise claim.refuse(f"{claim.origin} declares priority {priority!r}, not an int")
    return backend


def _check_facts(semantics: Semantics, claim: Provider) -> None:
    """Raise unless every fact has the type that it is declared with: structs do not look."""
    owners = {"p2p.": semantics.p2p, "collective.": semantics.collective, "": semantics}
    for prefix, owner in owners.items():
        for fact, hint in get_type_hints(type(owner)).items():
            value = getattr(owner, fact)
            if not isinstance(value, get_origin(hint) or hint) or (
                isinstance(value, bool) and hint is int
            ):
                raise claim.refuse(
                    f"{claim.origin} declares {prefix}{fact} = {value!r}, which is no "
                    f"{getattr(hint, '__name__', hint)}",
                    f"Correct the fact in {claim.distribution}: commlayer.semantics has the values",
                )


def _check_plugin_api(declared: object, claim: Provider) -> None:
    match declared:
        case (int(lowest), int(highest)) if lowest > highest:
            raise claim.refuse(
                f"{claim.origin} declares plugin_api {declared!r}: the lowest version comes first"
            )
        case (int(lowest), int(highest)):
            if lowest <= PLUGIN_API <= highest:
                return
            written = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
            raise claim.refuse(
                f"{claim.origin} was written for plugin API {written}; "
                f"this commlayer has {PLUGIN_API}",
                f"Upgrade {claim.distribution if highest < PLUGIN_API else 'commlayer'}",
            )
        case _:
            raise claim.refuse(
                f"{claim.origin} declares plugin_api {declared!r}, not (lowest, highest)"
            )


def describe(error: BaseException) -> str:
    text = printable(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def printable(text: object) -> str:
    """`text` without what would command a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(text))
