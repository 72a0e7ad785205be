"""Inject faults between two hosts and print what became of them.

``python tests/hosts/run.py [--repeat N] [--only NAME] [--write FILE]``; needs root and `ip`,
and `nft` for resets and lost packets.  Exits with 1 if a case did not end as expected.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hosts.network import ADDRESSES, INTERFACE, Hosts, obstacle  # noqa: E402
from hosts.traffic import play  # noqa: E402
from ranks.pool import Process, RankFailure, Ranks  # noqa: E402

HERE = Path(__file__).resolve().parent
NEAR, BESIDE, FAR = 0, 1, 2
HOST_OF = (0, 0, 1)
PEER_TIMEOUT = 5.0
MEGABITS = 400
HUGE = 1 << 26
"""Elements of 4 bytes of the message that the fault hits."""
PORT = 29500
PATIENCE = 60.0
FOREVER = 3600.0
UNSEEN = 30.0
"""Seconds after which a fault that nobody watches for counts as not detected."""
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


class Rank:
    """One rank's process, and all that it has said."""

    def __init__(self, process: Process) -> None:
        self.number = process.rank
        self.process = process
        self.said: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        try:
            while not self.all("end"):
                heard = self.process.hear(FOREVER)
                with self._changed:
                    self.said.append(heard)
                    self._changed.notify_all()
        except (RankFailure, OSError, EOFError):
            pass

    def all(self, what: str, **details: Any) -> list[dict[str, Any]]:
        return [
            each
            for each in list(self.said)
            if each["what"] == what and details.items() <= each.items()
        ]

    def wait_for(
        self, what: str, seconds: float = PATIENCE, after: float = 0.0, **details: Any
    ) -> dict[str, Any] | None:
        """The first such thing said later than `after`; ``None`` if it is not in time."""
        found: list[dict[str, Any]] = []

        def heard() -> bool:
            found[:] = [each for each in self.all(what, **details) if each["at"] > after]
            return bool(found)

        with self._changed:
            self._changed.wait_for(heard, seconds)
        return found[0] if found else None

    def expect(self, what: str, seconds: float = PATIENCE, after: float = 0.0) -> dict[str, Any]:
        said = self.wait_for(what, seconds, after)
        if said is None:
            raise Unexpected(f"rank {self.number} did not say {what!r}\n{self.output()}")
        return said

    def output(self) -> str:
        return "\n".join([*map(str, self.said[-8:]), self.process.output])

    def finish(self) -> None:
        """Let it close, and see that it ends well."""
        self.process.say("leave")
        if not self.process.ends(PATIENCE) or self.process.wait():
            raise Unexpected(f"rank {self.number} does not end well\n{self.output()}")

    def kill(self) -> None:
        """End it and what it has forked."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._listener.join(PATIENCE)


class Unexpected(Exception):
    """A case did not end as expected."""


@dataclass
class Scene:
    hosts: Hosts
    ranks: list[Rank]

    @property
    def far(self) -> Process:
        return self.ranks[FAR].process


def kill(scene: Scene) -> None:
    scene.far.signal(signal.SIGKILL)


def stop_for(seconds: float) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.far.signal(signal.SIGSTOP)
        time.sleep(seconds)
        scene.far.signal(signal.SIGCONT)

    return inject


def cut(scene: Scene) -> None:
    scene.hosts.cut()


def cut_for(seconds: float) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.hosts.cut()
        time.sleep(seconds)
        scene.hosts.heal()

    return inject


def swallow(scene: Scene) -> None:
    scene.hosts.lose(100)


def reset(scene: Scene) -> None:
    scene.hosts.reset()


def lose(percent: int) -> Callable[[Scene], None]:
    return lambda scene: scene.hosts.lose(percent)


def limit(megabits: int) -> Callable[[Scene], None]:
    return lambda scene: scene.hosts.limit(megabits)


@dataclass(frozen=True)
class Fault:
    """What is done in mid-transfer; `lost` says that peers must be reported."""

    name: str
    inject: Callable[[Scene], None]
    lost: bool
    far_lives: bool = True
    child: bool = False
    peer_timeout: float = PEER_TIMEOUT
    elements: int = HUGE
    filters: bool = False
    needed: bool = True
    """Whether being detected is required, or only measured."""


FAULTS = [
    Fault("none", lambda scene: None, lost=False),
    Fault("SIGKILL", kill, lost=True, far_lives=False),
    Fault("SIGKILL, a forked child lives on", kill, lost=True, far_lives=False, child=True),
    Fault("SIGSTOP for 7 s", stop_for(7), lost=False),
    Fault("link cut for 2 s", cut_for(2), lost=False),
    Fault("link cut for 3 s", cut_for(3), lost=False),
    Fault("link cut for good", cut, lost=True),
    Fault("every packet dropped", swallow, lost=True, filters=True),
    Fault("TCP reset", reset, lost=True, filters=True),
    Fault("5 % of packets lost", lose(5), lost=False, filters=True, elements=HUGE // 4),
    Fault("rate limit 40 Mbit/s", limit(40), lost=False, elements=HUGE // 2),
    Fault(
        "SIGKILL, without liveness", kill, lost=True, far_lives=False, peer_timeout=0.0,
        needed=False,
    ),
    Fault(
        "SIGKILL, a forked child lives on, without liveness", kill, lost=True, far_lives=False,
        child=True, peer_timeout=0.0, needed=False,
    ),
    Fault("link cut for good, without liveness", cut, lost=True, peer_timeout=0.0, needed=False),
]  # fmt: skip


@dataclass
class Outcome:
    """What was seen in all runs of one fault."""

    seconds: list[float] = field(default_factory=list)
    """Until the last of all living ranks that talk with a lost one was told, by run."""
    undetected: int = 0
    named: bool = True
    others: bool = True
    acknowledged: int = 0
    missing: int = 0
    false_alarms: int = 0
    problem: str = ""


def run(pool: Ranks, fault: Fault, hosts: Hosts, outcome: Outcome) -> None:
    """One run; raises `Unexpected` where it does not end as it must."""
    hosts.limit(MEGABITS)
    with started(pool, fault, hosts) as scene:
        near, beside, far = scene.ranks
        midway = far.expect("midway")
        if midway["whole"]:
            raise Unexpected("the transfer was over before the fault")
        begun = time.monotonic()
        fault.inject(scene)
        told = begun
        if fault.lost:
            told = await_loss(fault, scene, begun, outcome)
        else:
            sent = near.expect("sent")
            if len(sent["acknowledged"]) != 12:
                raise Unexpected(f"not everything arrived\n{near.output()}")
        if near.wait_for("rounds", after=told) is None or near.all("exchange failed"):
            outcome.others = False
        if not fault.lost:
            alarms = [a for rank in scene.ranks for a in (*rank.all("ended"), *rank.all("lost"))]
            outcome.false_alarms += len(alarms)
        unseen = fault.lost and not fault.needed and outcome.undetected
        count_messages(near, far, outcome)
        if not unseen:
            for rank in (near, beside, *((far,) if fault.far_lives else ())):
                rank.finish()
            if not beside.all("exchanged"):
                outcome.others = False


def await_loss(fault: Fault, scene: Scene, begun: float, outcome: Outcome) -> float:
    """Wait until everybody who must be told is told; the time of that."""
    near, beside, far = scene.ranks
    awaited = [(near, "lost", FAR), (near, "ended", FAR), (beside, "ended", FAR)]
    if fault.far_lives:
        awaited += [(far, "lost", NEAR), (far, "ended", NEAR), (far, "ended", BESIDE)]
    until = begun + (fault.peer_timeout + 5 if fault.needed else UNSEEN)
    last = begun
    for rank, what, peer in awaited:
        said = rank.wait_for(what, max(0.0, until - time.monotonic()), peer=peer)
        if said is None:
            outcome.undetected += 1
            if fault.needed:
                raise Unexpected(f"rank {rank.number} was not told of {peer}\n{rank.output()}")
            return time.monotonic()
        outcome.named &= said["kind"] == "peer_lost" and f"rank {peer}" in said["message"]
        last = max(last, said["at"])
    outcome.seconds.append(last - begun)
    wrong = [each for each in near.all("ended") if each["peer"] != FAR]
    if wrong or (fault.needed and last - begun > fault.peer_timeout):
        told = [
            (rank.number, peer, round(each["at"] - begun, 2))
            for rank, what, peer in awaited
            for each in rank.all(what, peer=peer)
        ]
        raise Unexpected(f"told after {last - begun:.2f} s: {told}, of others: {wrong}")
    return last


def count_messages(near: Rank, far: Rank, outcome: Outcome) -> None:
    """Compare what rank 0 holds for acknowledged with what rank 2 has."""
    sent = near.wait_for("sent", 10)
    received = far.wait_for("received", 10) if not far.process.ends(0) else None
    if sent is None:
        return
    acknowledged = sent["acknowledged"]
    outcome.acknowledged += len(acknowledged)
    if acknowledged != list(range(len(acknowledged))):
        outcome.missing += 1
    if received is not None:
        outcome.missing += len(set(acknowledged) - set(received["numbers"]))


@contextmanager
def started(pool: Ranks, fault: Fault, hosts: Hosts) -> Iterator[Scene]:
    """The three ranks; killed at the end, and the network as before."""
    environment = {
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "COMMLAYER_BACKEND": "gloo",
        "COMMLAYER_PEER_TIMEOUT": str(fault.peer_timeout),
    }
    names = [hosts.names[host] for host in HOST_OF]
    ranks: list[Rank] = []
    try:
        processes = pool.spawn(
            play, len(names), names, fault.elements, fault.child, environment=environment
        )
        ranks += map(Rank, processes)
        yield Scene(hosts, ranks)
    finally:
        for rank in ranks:
            rank.kill()
        pool.end_processes()
        end_children(hosts)
        hosts.heal()


def end_children(hosts: Hosts) -> None:
    """Kill what the ranks have left on the hosts."""
    for name in hosts.names:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        for pid in listed.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


def pipeline(hosts: Hosts) -> str:
    """The demo's pipeline by ``torchrun`` on both hosts; what its ranks print."""
    processes = []
    for host in range(2):
        command = hosts.command(
            host, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
            "--node-rank", str(host), "--nproc-per-node", "1", "--master-addr", ADDRESSES[0],
            "--master-port", str(PORT), str(HERE / "pipeline.py"),
        )  # fmt: skip
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    except subprocess.TimeoutExpired:
        outputs = ["no end after 120 s"]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        end_children(hosts)
    lines = [line for output in outputs for line in output.splitlines() if "identical" in line]
    if len(lines) != 2 or not all(line.endswith("identical: True") for line in lines):
        raise Unexpected("the pipeline over two hosts failed\n" + "\n".join(outputs))
    return "; ".join(lines)


def row(fault: Fault, outcome: Outcome, runs: int) -> str:
    if outcome.problem:
        detected = "**not as expected**"
    elif not fault.lost:
        detected = f"no alarm ({outcome.false_alarms} of {runs})" if outcome.false_alarms else "-"
    elif outcome.undetected:
        detected = f"not in {UNSEEN:.0f} s"
    else:
        low, high = min(outcome.seconds), max(outcome.seconds)
        detected = f"{statistics.median(outcome.seconds):.2f} s ({low:.2f} to {high:.2f})"
    after = "ranks report PEER_LOST" if fault.lost else "all messages arrived"
    if outcome.undetected:
        after = "nobody is told"
    named = ("yes" if outcome.named else "**no**") if fault.lost else "no alarm"
    if outcome.undetected:
        named = "no"
    lost = f"{outcome.missing or 'none'} of {outcome.acknowledged}" if outcome.acknowledged else "-"
    return (
        f"| {fault.name} | {runs} | {detected} | {named} | "
        f"{'intact' if outcome.others else '**disturbed**'} | "
        f"{lost} | {after} |"
    )


HEADER = (
    "| fault, in mid-transfer | runs | last rank told after | peer named | other traffic | "
    "acknowledged messages lost | then |\n|---|---|---|---|---|---|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Inject faults between two hosts")
    parser.add_argument("--repeat", type=int, default=1, help="runs of every fault")
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    parser.add_argument("--write", type=Path, help="put the table into this file, at its marks")
    arguments = parser.parse_args()
    reason = obstacle()
    if reason:
        print(f"Not run: {reason}")
        return 0
    failed = False
    lines = [HEADER]
    print(HEADER)
    pool = Ranks()
    with Hosts() as hosts, closing(pool):
        for fault in FAULTS:
            if arguments.only not in fault.name:
                continue
            if fault.filters and shutil.which("nft") is None:
                print(f"| {fault.name} | not run: there is no `nft` (apt-get install nftables) |")
                continue
            outcome = Outcome()
            for _ in range(arguments.repeat):
                try:
                    run(pool, fault, hosts, outcome)
                except (Unexpected, RuntimeError) as error:
                    outcome.problem = str(error)
                    print(f"{fault.name}: {error}", file=sys.stderr)
            failed |= bool(outcome.problem or outcome.missing or outcome.false_alarms)
            failed |= not (outcome.others and outcome.named)
            lines.append(row(fault, outcome, arguments.repeat))
            print(lines[-1], flush=True)
        if not arguments.only:
            try:
                print(f"\nThe demo's pipeline by torchrun over both hosts: {pipeline(hosts)}")
            except Unexpected as error:
                failed = True
                print(error, file=sys.stderr)
    if arguments.write:
        text = arguments.write.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        table = "\n".join(lines)
        arguments.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
