"""Schedules in a file, TOML or JSON.

::

    [channels]              # what each channel's transport declares, by name; or "*" for all
    data = "NAME"
    headers = { p2p = { post_may_block = "never", order = "per_tag" }, tags = true }

    [[ranks]]
    calls = [
        { send = 1, name = "header", channel = "headers", blocking = true },
        { group = [{ send = 1, name = "hidden" }, { recv = 1, name = "tokens" }] },
        { wait = "tokens" },
    ]

A call is one of ``send``, ``recv`` (the other rank), ``broadcast`` (the source),
``wait`` (the name of an operation), ``work`` (a name), ``synchronize`` (a stream),
``follow`` (a stream, with ``after``) and ``group``; the other keys are the
arguments of the functions in `commlayer_testkit.schedule.check`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from commlayer.errors import CommError, ErrorKind
from commlayer.semantics import Semantics
from commlayer_testkit.schedule import check as schedule
from commlayer_testkit.schedule.check import Action, Facts, Group, Schedule


class _Call(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    send: int | None = None
    recv: int | None = None
    broadcast: int | None = None
    wait: str | None = None
    work: str | None = None
    synchronize: str | None = None
    follow: str | None = None
    group: list[_Call] | None = None
    name: str = ""
    channel: str = "data"
    tag: int = 0
    nbytes: int | None = None
    blocking: bool = False
    stream: str = "main"
    after: str = "main"

    def entry(self) -> Action | Group:
        given = [key for key in _KINDS if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"a call is one of {', '.join(_KINDS)}, not {given or 'none'}")
        if self.group is not None:
            members = [call.entry() for call in self.group]
            return tuple(member for member in members if isinstance(member, Action))
        return self._action()

    def _action(self) -> Action:
        if self.send is not None:
            return schedule.send(
                self.send, self.name, channel=self.channel, tag=self.tag, nbytes=self.nbytes,
                blocking=self.blocking, stream=self.stream,
            )  # fmt: skip
        if self.recv is not None:
            return schedule.recv(
                self.recv, self.name, channel=self.channel, tag=self.tag,
                blocking=self.blocking, stream=self.stream,
            )  # fmt: skip
        if self.broadcast is not None:
            return schedule.broadcast(
                self.broadcast, self.name, channel=self.channel, nbytes=self.nbytes,
                blocking=self.blocking, stream=self.stream,
            )  # fmt: skip
        if self.wait is not None:
            return schedule.wait(self.wait, stream=self.stream)
        if self.synchronize is not None:
            return schedule.synchronize(self.synchronize)
        if self.follow is not None:
            return schedule.follow(self.follow, self.after)
        return schedule.work(self.work or "work", stream=self.stream)


_KINDS = ("send", "recv", "broadcast", "wait", "work", "synchronize", "follow", "group")


class _Rank(msgspec.Struct, forbid_unknown_fields=True):
    calls: list[_Call]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    channels: dict[str, str | Semantics]
    ranks: list[_Rank]


def read_schedules(path: Path, named: Callable[[str], Semantics]) -> tuple[list[Schedule], Facts]:
    """The schedules and facts in the file `path`; `named` finds a transport's facts.

    Raises `CommError` (CONFIG) for a file that cannot be read or says something
    else.
    """
    operation = f"schedules in {path}"
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        file = decode(path.read_bytes(), type=_File)
        schedules: list[Schedule] = [[call.entry() for call in rank.calls] for rank in file.ranks]
    except OSError as error:
        raise CommError(ErrorKind.CONFIG, operation, str(error), "Name a readable file") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise CommError(
            ErrorKind.CONFIG, operation, str(error), "See commlayer_testkit.schedule.files"
        ) from error
    facts = {
        channel: named(of) if isinstance(of, str) else of for channel, of in file.channels.items()
    }
    return schedules, facts.get("*", facts) if len(facts) == 1 else facts
