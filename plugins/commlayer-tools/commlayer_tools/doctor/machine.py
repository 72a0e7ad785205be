"""This process and its host: versions, devices, backends, network, settings."""

from __future__ import annotations

import os
import platform
import re
import socket
import struct
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from commlayer.backend import PLUGIN_API
from commlayer.config import ENVIRONMENT_PREFIX, CommConfig
from commlayer.device.backend import StreamBackend
from commlayer.errors import CommError
from commlayer.registry import Entry, Registry
from commlayer.wire.frame import WIRE_VERSION
from commlayer_tools.doctor.checks import Check, Status

_EXTRAS = {"cli": "typer", "sim": "greenlet", "metrics": "prometheus-client"}
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def facts(entries: list[Entry]) -> dict[str, Any]:
    """What there is, not judged."""
    return {
        "commlayer": {
            "version": installed("commlayer"),
            "wire_version": WIRE_VERSION,
            "plugin_api": PLUGIN_API,
            "extras": {name: bool(installed(package)) for name, package in _EXTRAS.items()},
        },
        "system": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "cores": len(os.sched_getaffinity(0)),
        },
        "torch": {
            "version": str(torch.__version__),
            "debug": torch.version.debug,
            "cuda": torch.version.cuda,
            "distributed": _distributed(),
        },
        "devices": _devices(),
        "backends": {
            entry.name: {
                "distribution": f"{entry.distribution} {entry.version}".rstrip(),
                "viable": entry.viable,
                "reason": entry.reason,
                "versions": {}
                if entry.loaded is None
                else {k: str(v) for k, v in entry.loaded.versions().items()},
            }
            for entry in entries
        },
        "interfaces": list(interfaces()),
        "environment": dict(_environment([entry.name for entry in entries])),
    }


def _environment(backends: list[str]) -> Iterator[tuple[str, str]]:
    """Variables of commlayer, of a launcher, and of the transports, which bear their names."""
    prefixes = (ENVIRONMENT_PREFIX, *(f"{name.upper()}_" for name in backends))
    for name, value in sorted(os.environ.items()):
        if name.startswith(prefixes) or name.endswith("_IFNAME") or name in _LAUNCHER:
            yield name, value


def installed(package: str) -> str:
    """The installed version, or an empty text."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _distributed() -> list[str]:
    if not dist.is_available():
        return []
    return [
        match[1]
        for name in dir(dist)
        if (match := re.fullmatch("is_(?!backend)(.+)_available", name)) and getattr(dist, name)()
    ]


def _devices() -> list[dict[str, Any]]:
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return []
    kind = accelerator.current_accelerator().type
    names = getattr(torch.get_device_module(kind), "get_device_name", None)
    return [
        {"device": f"{kind}:{index}", "name": names(index) if names else kind}
        for index in range(accelerator.device_count())
    ]


def interfaces() -> Iterator[dict[str, Any]]:
    """Network interfaces with their state and addresses."""
    six = _addresses_six()
    for _, name in socket.if_nameindex():
        state = Path("/sys/class/net", name, "operstate")
        four = _address_four(name)
        yield {
            "name": name,
            "state": state.read_text().strip() if state.exists() else "unknown",
            "addresses": ([four] if four else []) + six.get(name, []),
        }


_SIOCGIFADDR = 0x8915


def _address_four(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _addresses_six() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        address, *_, name = line.split()
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return found


def checks(registry: Registry, entries: list[Entry]) -> Iterator[Check]:
    """What can be judged without talking to anybody."""
    yield _configuration()
    yield _distributed_check()
    for entry in entries:
        status: Status = "ok" if entry.viable else "absent"
        yield Check(
            f"backend {entry.name}", status, entry.reason, "" if entry.viable else entry.install
        )
    yield _selection(registry)
    yield _own_name()


def _configuration() -> Check:
    try:
        config = CommConfig.load()
    except CommError as error:
        return Check("configuration", "failed", error.cause, error.cure)
    default = CommConfig()
    changed = [
        f"{field.name} = {getattr(config, field.name)!r}"
        for field in msgspec.structs.fields(CommConfig)
        if getattr(config, field.name) != getattr(default, field.name)
    ]
    return Check("configuration", "ok", ", ".join(changed) or "every key at its default")


def _distributed_check() -> Check:
    found = _distributed()
    if found:
        return Check("torch.distributed", "ok", f"built with {', '.join(found)}")
    cure = "Install a build of torch with torch.distributed"
    return Check("torch.distributed", "failed", "not in this build of torch", cure)


def _selection(registry: Registry) -> Check:
    try:
        chosen = registry.select(CommConfig.load().backend)
    except CommError as error:
        return Check("backend in use", "failed", error.cause, error.cure)
    return Check("backend in use", "ok", f"{chosen.backend.name} ({chosen.origin})")


def _own_name() -> Check:
    name = socket.gethostname()
    cure = (
        "Ranks on other hosts cannot find this one by name: give it a name that resolves to a "
        "routable address, or name the interface to use (bind_address, and the transport's own "
        "variable); one host alone does not need it"
    )
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Check("host name", "warning", f"{name} does not resolve ({error})", cure)
    if address.startswith("127."):
        return Check("host name", "warning", f"{name} resolves to {address}, this host only", cure)
    return Check("host name", "ok", f"{name} resolves to {address}")


def testable(entry: Entry) -> bool:
    """Whether a self-test between processes of this host can be run over the backend."""
    return (
        entry.viable
        and entry.loaded is not None
        and not isinstance(entry.loaded.backend, StreamBackend)
    )
