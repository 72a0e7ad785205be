"""Types of the standard library that travel by functions, as classes of the user may."""

from __future__ import annotations

import pathlib
from collections import deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from commlayer.wire.values.registered import register


def _timezone(value: Any) -> timezone:
    offset, name = value
    return timezone.utc if name == "UTC" and not offset else timezone(offset, name)


def _zone_key(zone: ZoneInfo) -> str:
    if zone.key is None:
        raise ValueError("a ZoneInfo that was read from a file has no key")
    return zone.key


def register_standard() -> None:
    """Register them all."""
    register(
        deque,
        "collections.deque",
        encode=lambda it: (list(it), it.maxlen),
        decode=lambda parts: deque(*parts),
    )
    register(
        date,
        "datetime.date",
        encode=date.toordinal,
        decode=date.fromordinal,
    )
    register(
        time,
        "datetime.time",
        encode=lambda t: (t.hour, t.minute, t.second, t.microsecond, t.tzinfo, t.fold),
        decode=lambda parts: time(*parts[:5], fold=parts[5]),
    )
    register(
        datetime,
        "datetime.datetime",
        encode=lambda t: (
            t.year,
            t.month,
            t.day,
            t.hour,
            t.minute,
            t.second,
            t.microsecond,
            t.tzinfo,
            t.fold,
        ),
        decode=lambda parts: datetime(*parts[:8], fold=parts[8]),
    )
    register(
        timedelta,
        "datetime.timedelta",
        encode=lambda d: (d.days, d.seconds, d.microseconds),
        decode=lambda parts: timedelta(*parts),
    )
    register(
        timezone,
        "datetime.timezone",
        encode=lambda zone: (zone.utcoffset(None), zone.tzname(None)),
        decode=_timezone,
    )
    register(ZoneInfo, "zoneinfo.ZoneInfo", encode=_zone_key, decode=ZoneInfo)
    register(UUID, "uuid.UUID", encode=lambda u: u.bytes, decode=lambda data: UUID(bytes=data))
    register(Decimal, "decimal.Decimal", encode=str, decode=Decimal)
    # A path of the other system's kind has the pure class.  The module in which these
    # classes are defined differs between versions of Python: hence the names.
    for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())):
        register(cls, f"pathlib.{cls.__name__}", encode=str, decode=cls)
