"""Run experiments in throw-away processes, and put what they measured beside what is declared."""

from __future__ import annotations

import difflib
import pickle
import platform
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from commlayer.backend import Backend
from commlayer.errors import CommError, ErrorKind
from commlayer.registry import default_registry
from commlayer_testkit.conformance.probes import completion, devices, failure, memory, ordering
from commlayer_testkit.conformance.probes.experiment import (
    Experiment,
    Measurement,
    Missing,
    Outcome,
    unmeasured,
)
from commlayer_testkit.conformance.probes.facts import COLLECTIVE, P2P, fact_names
from commlayer_testkit.conformance.probes.link import Subject, subject_of, subject_of_c10d
from commlayer_testkit.conformance.probes.rank import Concluded, ProbeRank, first_line
from commlayer_testkit.conformance.probes.report import (
    FactReport,
    ProbeReport,
    Verdict,
    compare,
    plain,
)
from commlayer_testkit.conformance.ranks import here
from commlayer_testkit.conformance.ranks.launcher import Launcher
from commlayer_testkit.conformance.ranks.pool import Process, RankFailure, Ranks

EXPERIMENTS = (
    *failure.EXPERIMENTS,
    *completion.EXPERIMENTS,
    *memory.EXPERIMENTS,
    *ordering.EXPERIMENTS,
    *devices.EXPERIMENTS,
)
_AT_ONCE = 8  # pairs of ranks; most of them sleep
_BATCH = 40  # pairs after which descriptors and stores are given back
_CONFIRM = 4  # how many times more patience an over-claim is measured again with
_UNPROBED = {"capture": "needs a graph capture of the engine's device"}


def probe(
    backend: str | Backend,
    *,
    options: Mapping[str, Any] | None = None,
    facts: Sequence[str] = (),
    patience: float = 1.0,
    heard: Callable[[str], None] | None = None,
) -> ProbeReport:
    """Measure the declared facts of a backend on its live transport.

    `backend` is the name of an installed one, or an instance that pickles (its
    class stands at the top of a module).  `facts` selects facts by full name or
    kind (``p2p.poll``, ``collective``; default all).  `patience` is how many
    seconds nothing must happen before that counts; an over-claim is measured again
    with four times as much.  `heard` is told which fact is measured next.

    Every experiment has two processes of its own with a hard limit, none of which
    is left behind.  Raises `CommError` (PLUGIN) where the backend cannot run here
    and `ValueError` for unknown facts.
    """
    if isinstance(backend, str):
        backend = default_registry().select(backend).backend
    else:
        viability = backend.viability()
        if not viability.ok:
            raise CommError(
                ErrorKind.PLUGIN,
                f"probe backend {backend.name!r}",
                f"it cannot run here: {viability.reason}",
                viability.install,
            )
    return _probe(subject_of(backend, dict(options or {})), facts, patience, heard)


def probe_c10d(
    name: str,
    *,
    facts: Sequence[str] = (),
    patience: float = 1.0,
    heard: Callable[[str], None] | None = None,
) -> ProbeReport:
    """Measure a backend of ``torch.distributed`` that has no plugin; see `probe`.

    `name` is what ``init_process_group`` takes, or ``module:name`` where importing
    `module` registers it.  Raises `CommError` (UNSUPPORTED) where torch lacks it.
    """
    try:
        subject = subject_of_c10d(name)
    except (ValueError, ImportError) as error:
        raise CommError(
            ErrorKind.UNSUPPORTED,
            f"probe c10d backend {name!r}",
            str(error),
            "Install a build that has it, or name MODULE:NAME if a module registers it",
        ) from error
    return _probe(subject, facts, patience, heard)


@dataclass
class _Run:
    """One experiment for one kind of operation, and what came of it."""

    experiment: Experiment
    kind: str
    outcomes: dict[str, tuple[Outcome, Outcome]]
    seconds: float = 0.0

    def measurements(self) -> dict[str, Measurement]:
        try:
            measured = self.experiment.judge(self.outcomes)
        except Missing as missing:
            measured = dict.fromkeys(self.experiment.facts, unmeasured(str(missing)))
        return {self.experiment.name(fact, self.kind): m for fact, m in measured.items()}


def _probe(
    subject: Subject,
    facts: Sequence[str],
    patience: float,
    heard: Callable[[str], None] | None,
) -> ProbeReport:
    wanted = _wanted(facts)
    present = subject.devices()
    if not present:
        raise CommError(
            ErrorKind.UNSUPPORTED,
            f"probe {subject.name!r}",
            "none of its devices is here",
            "Run it on a machine that has one",
        )
    _check_pickles(subject)
    started = time.monotonic()
    launcher = Launcher(subject.launcher, subject.rank_in_job)
    ranks = Ranks(preload=[__name__, *subject.modules], launcher=launcher)
    try:
        laboratory = _Laboratory(ranks, subject, present[0], heard or (lambda fact: None))
        reports = _reports(subject, wanted, laboratory.measure(_runs(subject, wanted), patience))
        doubted = {r.fact for r in reports.values() if r.verdict is Verdict.OVER_CLAIMED}
        again = _runs(subject, doubted)
        reports |= _reports(subject, doubted, laboratory.measure(again, _CONFIRM * patience))
    finally:
        ranks.close()
    return ProbeReport(
        name=subject.name,
        c10d=subject.backend is None,
        versions={**subject.versions(), "python": platform.python_version()},
        host=platform.node(),
        facts=tuple(reports[name] for name in fact_names() if name in wanted),
        seconds=round(time.monotonic() - started, 2),
    )


def _wanted(facts: Sequence[str]) -> set[str]:
    known = fact_names()
    wanted: set[str] = set()
    for fact in facts:
        chosen = [name for name in known if name == fact or name.startswith(f"{fact}.")]
        if not chosen:
            near = difflib.get_close_matches(fact, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown fact {fact!r}{hint}")
        wanted.update(chosen)
    return wanted or set(known)


def _check_pickles(subject: Subject) -> None:
    try:
        pickle.dumps(subject)
    except Exception as error:
        raise CommError(
            ErrorKind.UNSUPPORTED,
            f"probe backend {subject.name!r}",
            f"it cannot be handed to other processes ({first_line(error)})",
            "Define its class at the top of a module, and keep its instances free of live objects",
        ) from error


def _runs(subject: Subject, wanted: Iterable[str]) -> list[_Run]:
    kinds = (P2P, COLLECTIVE) if subject.c10d else (P2P,)
    wanted = set(wanted)
    return [
        _Run(experiment, kind, {})
        for kind in kinds
        for experiment in EXPERIMENTS
        if kind in experiment.kinds and wanted.intersection(experiment.names(kind))
    ]


def _reports(
    subject: Subject, wanted: Iterable[str], runs: Sequence[_Run]
) -> dict[str, FactReport]:
    measured: dict[str, Measurement] = {}
    seconds: dict[str, float] = {}
    for run in runs:
        for fact, measurement in run.measurements().items():
            measured[fact] = measurement
            seconds[fact] = round(run.seconds, 2)
    reports = {}
    for fact in wanted:
        measurement = measured.get(fact) or unmeasured(_why_not(subject, fact))
        reports[fact] = _report(subject, fact, measurement, seconds.get(fact, 0.0))
    return reports


def _why_not(subject: Subject, fact: str) -> str:
    if fact in _UNPROBED:
        return _UNPROBED[fact]
    if fact.startswith(COLLECTIVE) and not subject.c10d:
        return f"torch has no c10d backend {subject.name!r}"
    return "makes no sense for this kind of operation"


def _report(subject: Subject, fact: str, measurement: Measurement, seconds: float) -> FactReport:
    declared: Any = None
    if subject.declared is not None:
        kind, _, name = fact.rpartition(".")
        declared = getattr(getattr(subject.declared, kind) if kind else subject.declared, name)
    if measurement.why_not:
        verdict = Verdict.NOT_MEASURED
    elif subject.declared is None:
        verdict = Verdict.UNDECLARED
    else:
        verdict = compare(fact, declared, measurement.value, proven=measurement.proven)
    unproven = "" if measurement.proven else "an experiment can refute it, not prove it"
    return FactReport(
        fact=fact,
        verdict=verdict,
        declared=None if subject.declared is None else plain(fact, declared),
        measured=None if measurement.why_not else plain(fact, measurement.value),
        evidence=measurement.evidence,
        repetitions=measurement.repetitions,
        reason=measurement.why_not or unproven,
        proven=measurement.proven,
        seconds=seconds,
    )


class _Laboratory:
    """Runs experiments, several at once, each variant on two ranks of its own."""

    def __init__(
        self, ranks: Ranks, subject: Subject, device: str, heard: Callable[[str], None]
    ) -> None:
        self._ranks = ranks
        self._subject = subject
        self._device = device
        self._heard = heard

    def measure(self, runs: list[_Run], patience: float) -> list[_Run]:
        """Fill in the outcomes of `runs` and return them."""
        trials = [(run, variant) for run in runs for variant in run.experiment.variants]
        for first in range(0, len(trials), _BATCH):
            self._batch(trials[first : first + _BATCH], patience)
            self._ranks.end_processes()
        return runs

    def _batch(self, trials: list[tuple[_Run, str]], patience: float) -> None:
        waiting = iter(trials)
        watches: list[_Watch] = []
        while True:
            while len(watches) < _AT_ONCE and (trial := next(waiting, None)):
                watches.append(self._start(*trial, patience))
            if not watches:
                return
            speaking = [process for watch in watches for process in watch.pending]
            ready = select.select(speaking, [], [], 0.1)[0]
            for watch in watches:
                watch.listen(ready)
            watches = [watch for watch in watches if not watch.over()]

    def _start(self, run: _Run, variant: str, patience: float) -> _Watch:
        if not run.outcomes:
            self._heard(run.experiment.names(run.kind)[0])
        processes = self._ranks.spawn(
            _rank,
            2,
            self._subject,
            run.experiment.play,
            variant,
            run.kind,
            self._device,
            patience,
            finalize=False,
        )
        limit = (5 if self._subject.one_thread_only else 15) + 12 * patience
        return _Watch(run, variant, processes, limit, 8 + 4 * patience)


class _Watch:
    """Listens to the two ranks of an experiment until both have ended, or for too long.

    `limit` and `grace` are in seconds: what the experiment has, and what the other
    rank has left once one has ended, for it may wait for one that will never come.
    """

    def __init__(
        self, run: _Run, variant: str, processes: list[Process], limit: float, grace: float
    ) -> None:
        self.pending = list(processes)
        self._run = run
        self._processes = processes
        self._outcomes = run.outcomes[variant] = (Outcome(0), Outcome(1))
        self._started = time.monotonic()
        self._grace = grace
        self._deadline = self._started + limit

    def listen(self, ready: list[Process]) -> None:
        for process in [process for process in self.pending if process in ready]:
            outcome = self._outcomes[process.rank]
            try:
                name, value = process.hear(1)
            except RankFailure:
                outcome.ended, outcome.detail = "died", _cause_of_death(process)
            else:
                if name:
                    outcome.notes[name] = value
                    continue
                outcome.ended, outcome.detail = value
            self.pending.remove(process)
            grace = 0.0 if outcome.ended == "concluded" else self._grace
            self._deadline = min(self._deadline, time.monotonic() + grace)

    def over(self) -> bool:
        """Whether nothing more is to come; the ranks are then dead."""
        if self.pending and time.monotonic() < self._deadline:
            return False
        for process in self._processes:
            if process.exit_code is None:
                process.signal(signal.SIGKILL)
                process.wait()
        self._run.seconds += time.monotonic() - self._started
        return True


def _cause_of_death(process: Process) -> str:
    code = process.exit_code
    cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    said = [line.strip() for line in process.output.splitlines() if "what():" in line]
    return f"{cause}: {said[-1].partition('what():')[2].strip()[:100]}" if said else cause


def _rank(
    subject: Subject,
    play: Callable[[ProbeRank, str], None],
    variant: str,
    kind: str,
    device: str,
    patience: float,
) -> None:
    """Be one rank of an experiment; ends by being killed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rank, store = here.rank(), here.store()
    try:
        link = subject.open(kind, rank, PrefixStore("link", store), device)
        me = ProbeRank(
            rank,
            link,
            PrefixStore("words", store),
            here.say,
            patience,
            one_thread_only=subject.one_thread_only,
        )
        play(me, variant)
        here.say(("", ("returned", "")))
    except Concluded:
        here.say(("", ("concluded", "")))
    except Exception as error:
        here.say(("", ("raised", first_line(error))))
    here.hear()
