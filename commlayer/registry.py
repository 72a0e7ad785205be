"""Find, load, check and select backends.

Backends are modules named by entry points of the group ``commlayer.backends``.
Listing them reads metadata only.  A module is imported when its backend is
loaded by name, so that a broken plugin disturbs nobody who does not ask for it.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import logging
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint
from typing import TYPE_CHECKING

from commlayer.backend import Backend
from commlayer.errors import CommError, ErrorKind
from commlayer.forks import let_go_in_child
from commlayer.loading import (
    AUTO,
    LoadedBackend,
    Provider,
    checked,
    describe,
    load_plugin,
    plugin_manager,
)

if TYPE_CHECKING:
    from pluggy import HookRelay

GROUP = "commlayer.backends"

_log = logging.getLogger("commlayer")


@dataclass(frozen=True)
class Entry:
    """What is known of one backend name.

    `loaded` and `plugin_api` are ``None`` when the backend cannot be loaded;
    `viable` is then false and `reason` says what is wrong.
    """

    name: str
    distribution: str
    version: str
    viable: bool
    reason: str
    install: str = ""
    priority: int = 0
    plugin_api: tuple[int, int] | None = None
    loaded: LoadedBackend | None = field(default=None, repr=False)


class Registry:
    """The backends that can be named, and the hooks of engines.

    `entry_points` replaces what is installed.  Without it the installed
    distributions are read anew at each call, so that a plugin installed
    meanwhile is found.  May be used from any thread; a plugin is imported and
    its ``commlayer_backend`` hook called once.
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        self._entry_points = None if entry_points is None else list(entry_points)
        self._added: list[Provider] = []
        self._loaded: dict[tuple[EntryPoint, str, str], LoadedBackend] = {}
        self._engines: list[object] = []
        self._lock = let_go_in_child(threading.RLock())

    def names(self) -> list[str]:
        """All backend names, sorted.  Imports nothing."""
        return sorted(self._claims())

    def add_backend(self, backend: Backend) -> None:
        """Offer `backend` in this process, without an installed distribution.

        Raises `CommError` (PLUGIN) where it fails the checks of a plugin.
        """
        loaded = LoadedBackend(backend, "this process", "")
        claim = Provider(str(getattr(backend, "name", "")), "this process", "", loaded)
        checked(backend, claim)
        with self._lock:
            self._added.append(claim)

    def register(self, engine: object) -> None:
        """Add the hook implementations of an engine's module or object.

        They come before those of the selected plugin, the latest first.
        Raises `CommError` (PLUGIN) when one does not fit its specification.
        """
        try:
            plugin_manager().register(engine)
        except Exception as error:
            raise CommError(
                ErrorKind.PLUGIN,
                f"register the hooks of {engine!r}",
                describe(error),
                "Correct the hook implementation",
            ) from error
        with self._lock:
            if not any(known is engine for known in self._engines):
                self._engines.append(engine)

    def unregister(self, engine: object) -> None:
        """Remove what `register` added; unknown objects are ignored."""
        with self._lock:
            self._engines = [known for known in self._engines if known is not engine]

    def hooks(self, selected: LoadedBackend | None = None, *specifications: type) -> HookRelay:
        """The hooks of all registered engines and of the `selected` plugin.

        `specifications` are classes of further hooks, which a tool adds to the library's.
        """
        manager = plugin_manager(*specifications)
        if selected is not None and selected.plugin is not None:
            manager.register(selected.plugin)
        with self._lock:
            engines = list(self._engines)
        for engine in engines:
            if not manager.is_registered(engine):
                manager.register(engine)
        return manager.hook

    def load(self, name: str) -> LoadedBackend:
        """Import and check the backend `name`; it need not be viable.

        Raises `CommError` (PLUGIN) when the name is unknown or claimed twice,
        and when the plugin cannot be imported, has no ``commlayer_backend``
        hook or returns something that is not a `Backend` of that name for this
        plugin API.
        """
        claims = self._claims()
        if name not in claims:
            raise _unknown(name, sorted(claims))
        return self._load(name, claims[name])

    def survey(self) -> list[Entry]:
        """Load every backend and ask whether it is viable.  Never raises for a broken plugin."""
        return [self._entry(name, claims) for name, claims in sorted(self._claims().items())]

    def select(self, name: str) -> LoadedBackend:
        """The backend to use: `name`, or for ``auto`` the viable one of highest priority.

        Backends of equal priority are taken in the order of their names.  The
        choice, and why the others were not taken, goes to the logger
        ``commlayer``.  Raises `CommError` (PLUGIN) as `load` does, and when
        the backend, or with ``auto`` every backend, is not viable.
        """
        if name == AUTO:
            return self._select_best()
        loaded = self.load(name)
        viability = loaded.viability()
        if not viability.ok:
            raise CommError(
                ErrorKind.PLUGIN,
                f"select backend {name!r}",
                f"{loaded.origin} cannot run here: {viability.reason}",
                viability.install or "Choose another backend, or `auto`",
            )
        return loaded

    def _select_best(self) -> LoadedBackend:
        entries = self.survey()
        viable = [e for e in entries if e.viable and e.loaded is not None]
        if not viable:
            raise _none_viable(entries)
        best = min(viable, key=lambda e: (-e.priority, e.name))
        assert best.loaded is not None
        _log.info(
            "backend %r (%s) selected: viable (%s), priority %d",
            best.name,
            best.loaded.origin,
            best.reason,
            best.priority,
        )
        for entry in entries:
            if entry is not best:
                unusable = logging.WARNING if entry.loaded is None else logging.INFO
                why = f"priority {entry.priority}" if entry.viable else entry.reason
                _log.log(unusable, "backend %r not selected: %s", entry.name, why)
        return best.loaded

    def _entry(self, name: str, claims: list[Provider]) -> Entry:
        distribution = ", ".join(claim.distribution for claim in claims)
        version = ", ".join(claim.version for claim in claims)
        try:
            loaded = self._load(name, claims)
        except CommError as error:
            return Entry(name, distribution, version, False, error.cause, error.cure)
        viability = loaded.viability()
        return Entry(
            name,
            distribution,
            version,
            viability.ok,
            viability.reason,
            viability.install,
            loaded.backend.priority,
            loaded.backend.plugin_api,
            loaded,
        )

    def _load(self, name: str, claims: list[Provider]) -> LoadedBackend:
        if len(claims) > 1:
            raise _ambiguous(name, claims)
        (claim,) = claims
        if isinstance(claim.provider, LoadedBackend):
            return claim.provider
        key = (claim.provider, claim.distribution, claim.version)
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = load_plugin(claim, claim.provider)
            return self._loaded[key]

    def _claims(self) -> dict[str, list[Provider]]:
        points = _installed() if self._entry_points is None else self._entry_points
        claims: dict[str, list[Provider]] = {}
        for point in points:
            if not point.name.isprintable():
                _log.warning("entry point %r ignored: its name is not printable", point.name)
                continue
            claim = Provider(point.name, *_origin(point.dist), point)
            claims.setdefault(point.name, []).append(claim)
        with self._lock:
            added = list(self._added)
        for claim in added:
            claims.setdefault(claim.name, []).append(claim)
        return claims


@functools.cache
def default_registry() -> Registry:
    """The registry of this process: what is installed, and what was added to it."""
    return Registry()


def _installed() -> list[EntryPoint]:
    """Entry points of the group; a distribution found twice on the path counts once.

    Distributions whose metadata cannot be read are passed over: by reading
    them one by one, none hides the others.
    """
    found: dict[str, list[EntryPoint]] = {}
    for distribution in importlib.metadata.distributions():
        points: list[EntryPoint] = []
        name, version = "", ""
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name, version = _origin(distribution)
            points = [point for point in distribution.entry_points if point.group == GROUP]
        except Exception as error:
            _log.warning("entry points of %s %s ignored: %s", name, version, describe(error))
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), points)
    return [point for points in found.values() for point in points]


def _origin(distribution: Distribution | None) -> tuple[str, str]:
    """Name and version of a distribution, however broken its metadata."""
    if distribution is None:
        return "unknown distribution", ""
    try:
        metadata = distribution.metadata
        return str(metadata["Name"] or "unknown distribution"), str(metadata["Version"] or "")
    except Exception:
        return "unknown distribution", ""


def _unknown(name: str, known: list[str]) -> CommError:
    near = difflib.get_close_matches(name, known, n=1)
    hints = [f"Did you mean {near[0]!r}?"] if near else []
    hints.append(f"Installed backends: {', '.join(known) or 'none'}.")
    if not near:  # else it is a misspelt name, of which there is no distribution
        hints.append(f"For a backend of this project: pip install commlayer-{name or 'NAME'}")
    return CommError(
        ErrorKind.PLUGIN,
        f"select backend {name!r}",
        "no installed distribution provides it",
        " ".join(hints),
    )


def _ambiguous(name: str, claims: list[Provider]) -> CommError:
    origins = [claim.origin for claim in claims]
    return CommError(
        ErrorKind.PLUGIN,
        f"select backend {name!r}",
        f"{len(claims)} distributions claim the name: {' and '.join(origins)}",
        "Uninstall all but one",
    )


def _none_viable(entries: list[Entry]) -> CommError:
    if not entries:
        return CommError(
            ErrorKind.PLUGIN,
            f"select backend {AUTO!r}",
            "no backend is installed",
            "Install one: pip install commlayer-NAME",
        )
    return CommError(
        ErrorKind.PLUGIN,
        f"select backend {AUTO!r}",
        "no installed backend can run here: "
        + "; ".join(f"{entry.name}: {entry.reason}" for entry in entries),
        "; ".join(f"{e.name}: {e.install}" for e in entries if e.install) or "Install another one",
    )
