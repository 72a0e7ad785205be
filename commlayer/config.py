"""Configuration: one typed value, from a mapping, a TOML file or the environment.

Precedence, key by key: the mapping handed to `commlayer.connect`, then
``COMMLAYER_*`` environment variables, then the TOML file, then the default: what an
operator sets for one process counts before what a file says for all.  The file is
the one named by the key ``config`` of the mapping, or by ``COMMLAYER_CONFIG``.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from commlayer.errors import CommError, ErrorKind

ENVIRONMENT_PREFIX = "COMMLAYER_"
_DEFAULT_NAME = "commlayer"


def _key(description: str, unit: str = "", **limits: Any) -> Meta:
    return Meta(description=description, extra={"unit": unit}, **limits)


class ChannelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is set for one channel."""

    may_idle: bool = False
    """Receives on it may wait for ever, as for the next request: they are no stall."""


class CommConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that can be set.

    Immutable; ``msgspec.structs.replace`` makes an altered copy.  Constructing
    one raises ``ValueError`` for a value of the wrong type or range.
    """

    backend: Annotated[
        str, _key("Backend by name, or `auto`: the viable one of highest priority.", min_length=1)
    ] = "auto"
    name: Annotated[
        str,
        _key("Name of the connection; ranks that connect together use the same.", min_length=1),
    ] = _DEFAULT_NAME
    channels: Annotated[
        tuple[str, ...] | dict[str, ChannelConfig],
        _key(
            "Channels beside the built-in `data`, `control`, `fold` and `broadcast`: a list of "
            "names, or a table with the settings of each. `may_idle = true`: receives on it may "
            "wait for ever and are no stall."
        ),
    ] = ()
    connect_timeout: Annotated[
        float, _key("How long connecting may wait for absent ranks.", "seconds", gt=0, le=1e9)
    ] = 60.0
    close_timeout: Annotated[
        float,
        _key("Limit of `close()` without one, and at interpreter exit.", "seconds", ge=0, le=1e9),
    ] = 10.0
    peer_timeout: Annotated[
        float,
        _key(
            "A peer that cannot be reached for this long is reported lost; a dead one at once. "
            "At least 2; 0 turns the liveness connections off.",
            "seconds",
            ge=0,
            le=1e6,
        ),
    ] = 5.0
    bind_address: Annotated[
        str,
        _key(
            "Address or name of this host at which its liveness listener binds; empty: the one "
            "by which ranks reach the store."
        ),
    ] = ""
    max_inflight_ops: Annotated[int, _key("Bound on sends in flight.", "operations", ge=1)] = 4096
    max_inflight_bytes: Annotated[
        int, _key("Bound on bytes of sends in flight.", "bytes", ge=1)
    ] = 1 << 30
    unbounded_channels: Annotated[
        tuple[str, ...],
        _key(
            "Channels whose sends are never held up by the bounds: a virtual pipeline posts its "
            "fold sends long before they are received."
        ),
    ] = ("fold",)
    on_full: Annotated[
        Literal["wait", "raise"],
        _key("At the bound a send waits for room (at most `full_timeout`), or raises at once."),
    ] = "wait"
    full_timeout: Annotated[
        float,
        _key("How long a send waits for room before it raises FULL.", "seconds", ge=0, le=1e9),
    ] = 60.0
    retention: Annotated[
        str,
        _key(
            "Retention policy by name: `hold_references` or `copy_on_post`; for device transports "
            "also `hold_until_event`."
        ),
    ] = "hold_references"
    max_device_lanes: Annotated[
        int,
        _key(
            "Communicators for device tensors that a rank has: one for each channel, tag, peer and "
            "direction. Torch has 32 streams for them.",
            "communicators",
            ge=1,
            le=32,
        ),
    ] = 32
    device_lanes_at_connect: Annotated[
        int,
        _key(
            "How many of them `connect` makes, for the lanes without tags, nearest ranks first; "
            "the others are made in the background when they are first used.",
            "communicators",
            ge=0,
            le=32,
        ),
    ] = 16
    copy_max_bytes: Annotated[
        int,
        _key("`copy_on_post` refuses larger tensors; 0: it copies any.", "bytes", ge=0),
    ] = 0
    reaping: Annotated[
        str,
        _key(
            "Reaping policy by name: `background` or `fifo`; for device transports also "
            "`gate_on_device`."
        ),
    ] = "background"
    progress: Annotated[
        Literal["auto", "waiter", "polling"],
        _key("How completion is noticed; `auto` chooses from the backend's facts."),
    ] = "auto"
    wait_mode: Annotated[
        Literal["safe", "direct"],
        _key(
            "`direct`: on host transports a wait without limit enters the native wait itself, "
            "which saves a hop between threads; it cannot be interrupted then, nor told of a lost "
            "peer."
        ),
    ] = "safe"
    headers_ahead: Annotated[
        int,
        _key("Header receives that a lane keeps posted, where the transport allows.", ge=1, le=64),
    ] = 4
    payloads_ahead: Annotated[
        int,
        _key(
            "Schemas of a lane whose payload is received ahead of its header, where the transport "
            "allows.",
            ge=0,
            le=6,
        ),
    ] = 6
    inline_bytes: Annotated[
        int,
        _key(
            "Tensors travel inside the header message while they fit; equal on all ranks.",
            "bytes",
            ge=0,
            le=1 << 20,
        ),
    ] = 1 << 18
    unclaimed_messages: Annotated[
        int,
        _key(
            "Messages a lane takes in before anybody asks for them; none with a tag but 0.",
            "messages",
            ge=1,
        ),
    ] = 16
    max_header_bytes: Annotated[int, _key("Largest header accepted or sent.", "bytes", ge=4096)] = (
        16 << 20
    )
    max_message_bytes: Annotated[
        int, _key("Largest sum of tensors in one message accepted or sent.", "bytes", ge=1)
    ] = 16 << 30
    max_items: Annotated[
        int, _key("Most values (keys, list items, tensors) in one message.", "values", ge=1)
    ] = 100_000
    max_depth: Annotated[
        int, _key("Deepest nesting of containers in one message.", "levels", ge=1, le=200)
    ] = 64
    allow_pickle: Annotated[
        bool,
        _key(
            "Send and accept pickled values of unknown types. A peer can then run code here; "
            "equal on all ranks."
        ),
    ] = False
    record_sites: Annotated[bool, _key("Record the source line that posted each operation.")] = (
        False
    )
    check_lifetime: Annotated[
        bool,
        _key(
            "Compare a checksum of every posted source at completion; an overwrite in flight "
            "raises LIFETIME with the posting line."
        ),
    ] = False
    stall_timeout: Annotated[
        float,
        _key(
            "An operation that is so old has every rank report who waits for whom; 0 is off.",
            "seconds",
            ge=0,
            le=1e9,
        ),
    ] = 60.0
    report_signal: Annotated[
        str,
        _key("Signal, such as `SIGUSR1`, on which a report is logged; empty for none."),
    ] = ""
    recorder_size: Annotated[
        int,
        _key(
            "Operations that the flight recorder keeps; 0 is off, or 4096 where `trace_dir` is "
            "set.",
            "operations",
            ge=0,
            le=1 << 24,
        ),
    ] = 0
    trace_dir: Annotated[
        str,
        _key(
            "Folder into which the flight recorder writes on an error, on a stall and at close, "
            "for `commlayer trace`; empty for none."
        ),
    ] = ""
    metrics: Annotated[
        bool,
        _key(
            "Keep figures in the default registry of prometheus-client, or in the files of its "
            "multiprocess mode."
        ),
    ] = False
    check_slices: Annotated[
        bool,
        _key(
            "Compare checksums of tensors that are sent in parts among the ranks of "
            "`all_gather_group`, which wait for each other; a tensor that differs raises CONFIG "
            "before it is sent."
        ),
    ] = False
    options: Annotated[
        dict[str, Any], _key("Options of the backend; its own documentation names them.")
    ] = {}

    def __post_init__(self) -> None:
        for name, kind in _known().items():
            try:
                value = msgspec.convert(getattr(self, name), kind)
                msgspec.structs.force_setattr(self, name, value)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name}: {error}") from None
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite")
        if 0 < self.peer_timeout < 2:
            raise ValueError(
                "peer_timeout must be at least 2, or 0 for off: keepalive counts whole seconds"
            )
        if len(self.channels) > 1000:
            raise ValueError(f"at most 1000 channels, got {len(self.channels)}")
        if len(set(self.channels)) != len(self.channels):
            raise ValueError("channels must be named once each")
        if any(not channel or channel.strip() != channel for channel in self.channels):
            raise ValueError("channels must be non-empty names without surrounding blanks")

    @property
    def own_name(self) -> str:
        """`name`, where there is another than the default one."""
        return "" if self.name == _DEFAULT_NAME else self.name

    @property
    def idle_channels(self) -> frozenset[str]:
        """Channels on which receives may wait for ever."""
        if not isinstance(self.channels, dict):
            return frozenset()
        return frozenset(name for name, channel in self.channels.items() if channel.may_idle)

    def with_channels(self, names: Iterable[str]) -> CommConfig:
        """A copy that has the channels of `names`, too, after its own."""
        added = [name for name in names if name not in self.channels]
        if isinstance(self.channels, dict):
            more = dict.fromkeys(added, ChannelConfig())
            return msgspec.structs.replace(self, channels=self.channels | more)
        return msgspec.structs.replace(self, channels=(*self.channels, *added))

    @classmethod
    def load(
        cls,
        mapping: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> CommConfig:
        """Build the configuration from its three sources.

        Raises `CommError` (CONFIG) for an unknown key, naming the nearest known
        one, for a value of the wrong type or range, and for an unreadable file.
        """
        return cls.load_with_sources(mapping, environ=environ)[0]

    @classmethod
    def load_with_sources(
        cls,
        mapping: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> tuple[CommConfig, dict[str, str]]:
        """As `load`, with the source of each key that is not left at its default."""
        environ = os.environ if environ is None else environ
        mapping = {} if mapping is None else mapping
        if not isinstance(mapping, Mapping):
            raise _invalid("mapping", f"expected a mapping, got {type(mapping).__name__}")
        settings = dict(mapping)
        path = settings.pop("config", None) or environ.get(ENVIRONMENT_PREFIX + "CONFIG")
        given = {}
        if path:
            values = _from_file(path)  # checks that it is a path
            given[f"file {os.fspath(path)}"] = values
        given["environment"] = _checked(_from_environment(environ), "environment")
        given["mapping"] = _checked(settings, "mapping")
        merged: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for source, values in given.items():
            merged |= values
            sources |= dict.fromkeys(values, source)
        return msgspec.convert(merged, cls), sources


@cache  # msgspec evaluates every annotation anew: 25 ms of each `connect`
def _known() -> dict[str, Any]:
    """The types of all keys."""
    return {field.name: field.type for field in msgspec.structs.fields(CommConfig)}


def _checked(settings: dict[str, Any], source: str) -> dict[str, Any]:
    """Return `settings` if its keys are known and its values valid; `source` is for the message."""
    known = _known()
    for key in settings:
        if key not in known:
            raise _unknown(key, source, list(known))
    try:
        msgspec.convert(settings, CommConfig)
    except ValueError as error:
        raise _invalid(source, str(error)) from error
    return settings


def _invalid(source: str, cause: str) -> CommError:
    return CommError(
        ErrorKind.CONFIG,
        f"configuration ({source})",
        cause,
        "Correct the value; `commlayer config` lists the keys with type and range",
    )


def _unknown(key: object, source: str, known: list[str]) -> CommError:
    folded = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(str(key).lower(), folded, n=1)
    cure = (
        f"Did you mean {folded[near[0]]!r}?" if near else f"Known keys: {', '.join(sorted(known))}"
    )
    return CommError(ErrorKind.CONFIG, f"configuration ({source})", f"unknown key {key!r}", cure)


def _from_file(path: object) -> dict[str, Any]:
    if not isinstance(path, (str, os.PathLike)):
        raise _invalid("config", f"expected the path of a file, got {path!r}")
    source = f"file {os.fspath(path)}"
    operation = f"configuration ({source})"
    try:
        with open(path, "rb") as file:
            data = msgspec.toml.decode(file.read())
    except OSError as error:
        raise CommError(ErrorKind.CONFIG, operation, str(error), "Name a readable file") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CommError(ErrorKind.CONFIG, operation, str(error), "Correct the TOML") from error
    settings = data.get("commlayer", data)
    if not isinstance(settings, dict):
        raise _invalid(source, "`commlayer` is not a table")
    return _checked(settings, source)


RESERVED_ENVIRONMENT = frozenset({"CONFIG", "VLLM"})
"""Variables with the prefix that are not keys: the file, and what enables commlayer-vllm."""


OF_A_SERVICE = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""What Kubernetes and Docker links set in every container for a service whose name begins with
``commlayer``: ``COMMLAYER_SERVICE_HOST``, ``COMMLAYER_API_PORT_80_TCP_ADDR``."""


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Values of ``COMMLAYER_<KEY>`` variables; lists are comma-separated, tables are JSON."""
    types = _known()
    keys = {ENVIRONMENT_PREFIX + key.upper(): key for key in types}
    defaults = CommConfig()
    lists = {key for key in types if isinstance(getattr(defaults, key), tuple)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        suffix = variable[len(ENVIRONMENT_PREFIX) :]
        if suffix in RESERVED_ENVIRONMENT:
            continue
        if variable not in keys and OF_A_SERVICE.fullmatch(suffix):
            continue
        if variable not in keys:
            raise _unknown(variable, "environment", list(keys))
        key = keys[variable]
        try:
            if key == "channels" and text.lstrip().startswith("{"):
                values[key] = msgspec.json.decode(text, type=dict[str, ChannelConfig])
            elif key in lists:
                values[key] = tuple(part.strip() for part in text.split(",") if part.strip())
            elif key == "options":
                values[key] = msgspec.json.decode(text, type=dict[str, Any])
            else:
                values[key] = msgspec.convert(text, types[key], strict=False)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise _invalid(f"environment {variable}", str(error)) from error
    return values
