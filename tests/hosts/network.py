"""Two network namespaces of this machine, connected as two hosts are."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import threading
from types import TracebackType

INTERFACE = "cable0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def obstacle() -> str:
    """Why this machine cannot do it; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root (sudo make test-hosts)"
    if shutil.which("ip") is None:
        return "there is no `ip` (Debian: apt-get install iproute2)"
    name = f"commlayer-{os.getpid()}-x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made ({made.stderr.strip()})"
    _run("ip", "netns", "del", name)
    return ""


_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_FLAGS = struct.Struct("16sH22x")
"""``struct ifreq`` (``linux/if.h``) of a name and flags."""


def enter(name: str) -> None:
    """Move the calling thread, and those that it starts, to the host `name`."""
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    finally:
        os.close(descriptor)


def _take_down(name: str) -> None:
    """As ``ip link set down``, on the host `name`.  Leaves the calling thread there."""
    enter(name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = _FLAGS.pack(INTERFACE.encode(), 0)
        flags: int = _FLAGS.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        request = _FLAGS.pack(INTERFACE.encode(), flags & ~_IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


class Hosts:
    """Hosts 0 and 1 and the cable between them; both are gone after the ``with`` statement."""

    def __init__(self) -> None:
        self.names = [f"commlayer-{os.getpid()}-{index}" for index in range(2)]

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            first, second = self.names
            _run("ip", "-n", first, "link", "add", INTERFACE, "type", "veth",
                 "peer", "name", INTERFACE, "netns", second)  # fmt: skip
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        except RuntimeError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def command(self, host: int, *command: str) -> list[str]:
        """What runs `command` on `host`."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def cut(self) -> None:
        """Unplug the cable, at once: starting `ip` can take long on a busy machine."""
        unplugging = threading.Thread(target=_take_down, args=(self.names[1],))
        unplugging.start()
        unplugging.join()

    def heal(self) -> None:
        """Plug it in again, and take every rule back."""
        _run("ip", "-n", self.names[1], "link", "set", INTERFACE, "up")
        for host in range(2):
            if shutil.which("nft") is not None:
                subprocess.run(self.command(host, "nft", "flush", "ruleset"), capture_output=True)
            subprocess.run(
                self.command(host, "tc", "qdisc", "del", "dev", INTERFACE, "root"),
                capture_output=True,
            )

    def limit(self, megabits: int) -> None:
        """Let no more than so many megabits a second through, each way."""
        for host in range(2):
            _run(*self.command(host, "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf",
                 "rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms"))  # fmt: skip

    def lose(self, percent: int) -> None:
        """Drop so many of a hundred packets at random, each way."""
        self._filter("drop" if percent >= 100 else f"numgen random mod 100 < {percent} drop")

    def reset(self) -> None:
        """Answer every TCP packet by a reset, as a middlebox that has forgotten does."""
        self._filter("tcp flags & rst == 0 reject with tcp reset")

    def _filter(self, rule: str) -> None:
        for host in range(2):
            nft = self.command(host, "nft")
            _run(*nft, "add table inet faults")
            _run(*nft, "add chain inet faults in { type filter hook input priority 0; }")
            _run(*nft, f"add rule inet faults in iifname {INTERFACE} {rule}")
