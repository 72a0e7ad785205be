"""What watches one connection, as the configuration asks for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.lanes.connection import Connection
from commlayer.observe.diagnosis import diagnose
from commlayer.observe.events import EventObserver, StallEvent
from commlayer.observe.exporter import Exporter, load_exporter
from commlayer.observe.inquiry import Inquiry
from commlayer.observe.recorder import LOCAL_SIZE, Identity, Recorder, file_name, write
from commlayer.observe.report import Report
from commlayer.observe.signals import SignalHook
from commlayer.observe.spans import FanOut, Sink, Spans
from commlayer.observe.stall import StallWatch, Watchdog
from commlayer.observe.survey import Survey
from commlayer.progress.observer import Observer

logger = logging.getLogger("commlayer")

ANSWER_SECONDS = 5.0
"""How long a report that nobody asked for waits for other ranks."""
_LONGEST_INTERVAL = 15.0
_SIGNAL_INTERVAL = 0.5
_JUDGED_AFTER = 1.0


class Observation:
    """Reports, dumps and metrics of one connection; made before it opens.

    `steps` returns the number of broadcasts of each channel, and `emit` is the
    hook ``commlayer_event``, or ``None`` where no plugin implements it.  With
    `monitored` False no task of its own runs, whatever the configuration says.
    """

    def __init__(
        self,
        connection: Connection,
        config: CommConfig,
        *,
        backend: str,
        steps: Callable[[], Mapping[str, int]],
        emit: Callable[..., Any] | None,
        monitored: bool,
    ) -> None:
        self.last_report: Report | None = None
        self._connection = connection
        self._name = config.name
        self._limit = config.stall_timeout
        self._alarm = ""
        self._error = ""
        self._signalled = False
        self._said_at = -float("inf")
        self._closed = False
        self._process = os.getpid()
        self._may_idle = config.idle_channels
        self._survey = Survey(connection, steps, self._may_idle)
        self._inquiry = Inquiry(connection, self._survey, self._on_alarm)
        self._watch = (
            StallWatch(config.stall_timeout, self._may_idle) if config.stall_timeout else None
        )
        self._recorder: Recorder | None = None
        self._metrics: Exporter | None = None
        self._spans: Spans | None = None
        self._events: EventObserver | None = None
        self._path: Path | None = None
        now = connection.runtime.now
        sinks: list[Sink] = []
        observers: list[Observer] = []
        size = config.recorder_size or (LOCAL_SIZE if config.trace_dir else 0)
        if size:
            who = Identity.here(config.name, connection.rank, connection.size, backend)
            self._file = file_name(config.name, connection.rank)
            self._recorder = Recorder(size, who, self._on_error)
            sinks.append(self._recorder)
            if config.trace_dir:
                self._path = Path(config.trace_dir, self._file)
        if config.metrics:
            make = load_exporter()
            self._metrics = make(connection, backend, config.name, config.idle_channels)
            sinks.append(self._metrics)
        if sinks:
            self._spans = Spans(now, sinks)
            observers.append(self._spans)
        if emit is not None:
            self._events = EventObserver(connection.rank, now, emit)
            observers.append(self._events)
        if observers:
            connection.ledger.observer = observers[0] if len(observers) == 1 else FanOut(observers)
        self._signal: SignalHook | None = None
        self._monitor: Watchdog | None = None
        published = self._metrics is not None and self._metrics.in_files
        if monitored and (self._watch or self._path or config.report_signal or published):
            interval = min(_LONGEST_INTERVAL, self._limit / 4 or _LONGEST_INTERVAL)
            if config.report_signal:
                interval = min(interval, _SIGNAL_INTERVAL)
                self._signal = SignalHook(config.report_signal, self._on_signal)
            self._monitor = Watchdog(connection.runtime, interval, self._check, connection.abandon)

    def start(self) -> None:
        """Begin to watch; called once the connection is open."""
        if self._monitor is not None:
            self._monitor.start()

    # Told on other tasks: these only set what `_check` looks at

    def _on_alarm(self, rank: int) -> None:
        self._alarm = f"rank {rank} reports that something does not move"
        self._wake()

    def _on_error(self, kind: str) -> None:
        if not self._error and self._path is not None:
            self._error = kind
            self._wake()

    def _on_signal(self) -> None:
        self._signalled = True

    def _wake(self) -> None:
        if self._monitor is not None:
            self._monitor.wake()

    def _check(self) -> None:
        if self._signalled:
            self._signalled = False
            self._say("a signal asks for it")
        if self._watch is not None:
            why, alarm = self._watch.due(self._survey.look()), self._alarm
            self._alarm = ""
            if why:
                self._say(why, stalled=True)
            elif alarm and self._connection.runtime.now() - self._said_at >= self._limit:
                self._say(alarm)
        if self._error not in ("", _WRITTEN):
            self._write(f"an operation failed ({self._error})")
            self._error = _WRITTEN
        if self._metrics is not None:
            self._metrics.publish()

    def _say(self, reason: str, *, stalled: bool = False) -> None:
        older_than = self._limit / 2 if self._limit else _JUDGED_AFTER
        report = self._report(reason, ANSWER_SECONDS, older_than, stalled=stalled)
        self._said_at = self._connection.runtime.now()
        self.last_report = report
        logger.warning("%s", report)
        if stalled:
            if self._metrics is not None:
                self._metrics.stalls += 1
            if self._events is not None:
                self._events.send(StallEvent(report))
        self._write(reason)

    def _report(
        self, reason: str, timeout: float, older_than: float, *, stalled: bool = False
    ) -> Report:
        connection = self._connection
        return diagnose(
            self._inquiry.ask(timeout, stalled=stalled),
            name=self._name,
            rank=connection.rank,
            world_size=connection.size,
            older_than=older_than,
            reason=reason,
            may_idle=self._may_idle,
        )

    def report(self, timeout: float) -> Report:
        """Ask every rank now.  Operations younger than a second are listed and not judged."""
        judged = min(_JUDGED_AFTER, self._limit / 2) if self._limit else _JUDGED_AFTER
        return self._report("asked for", timeout, judged)

    def dump(self, folder: str | os.PathLike[str] | None) -> Path:
        """Write what is recorded into `folder`, or into ``trace_dir``; returns the file."""
        if self._recorder is None:
            raise CommError(
                ErrorKind.CONFIG, "dump", "nothing is recorded", "Set recorder_size or trace_dir"
            )
        path = self._path if folder is None else Path(folder, self._file)
        if path is None:
            raise CommError(
                ErrorKind.CONFIG, "dump", "no folder is named", "Name one, or set trace_dir"
            )
        try:
            self._dump(path, "asked for")
        except OSError as error:
            raise CommError(
                ErrorKind.CONFIG, f"dump to {path}", str(error), "Name a folder that can be written"
            ) from error
        return path

    def _write(self, reason: str) -> None:
        """Dump into the configured folder, if any; a folder that cannot be written is logged."""
        if self._path is None:
            return
        try:
            self._dump(self._path, reason)
        except OSError as error:
            logger.warning("commlayer: no dump in %s: %s", self._path, error)

    def _dump(self, path: Path, reason: str) -> None:
        assert self._recorder is not None
        assert self._spans is not None
        text = "" if self.last_report is None else str(self.last_report)
        write(self._recorder.dump(self._spans.open(), reason, text), path)

    def close(self) -> None:
        """Stop watching, and write the last dump.

        A second one does nothing, nor does one in a forked child: the dump is the parent's.
        """
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        if self._signal is not None:
            self._signal.remove()
        if self._monitor is not None:
            self._monitor.stop()
        if self._metrics is not None:
            self._metrics.close()
        self._write("closed")


_WRITTEN = "written"
