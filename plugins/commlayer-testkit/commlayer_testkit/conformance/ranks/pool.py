"""Start ranks, talk with them, wait for them and end them."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from commlayer_testkit.conformance.ranks import here
from commlayer_testkit.conformance.ranks.forkserver import FORK, REAP, Job
from commlayer_testkit.conformance.ranks.launcher import Launch, Launcher, Place
from commlayer_testkit.conformance.ranks.stopping import stopped
from commlayer_testkit.ports import LOOPBACK

_SERVER = "commlayer_testkit.conformance.ranks.forkserver"
_AFTERMATH = 1.0
"""Seconds in which ranks may fail after the first, and be reported with it."""


class RankFailure(AssertionError):
    """A rank raised, hung, or ended otherwise than it should; names it and shows its output."""


class ForkServer:
    """The client's side of `forkserver`, which imports `preload`; started at its first use."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = preload
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> int:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-m", _SERVER, str(theirs.fileno()), *self._preload],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(_search_path())},
                )
        try:
            socket.send_fds(self._socket, [request], descriptors)
            return int(self._socket.recv(64))
        except (OSError, ValueError) as error:
            raise RuntimeError("the fork server has died; its error output says why") from error

    def fork(self, connection: int, output: int, lent: Mapping[int, int]) -> int:
        """Fork a rank and return its process id; `lent` descriptors keep their numbers there."""
        numbers = "".join(f" {number}" for number in lent)
        return self._ask(FORK + numbers.encode(), [connection, output, *lent.values()])

    def reap(self, pid: int) -> int:
        """The exit code of a rank that has ended: negative for a signal."""
        return self._ask(REAP + str(pid).encode())

    def close(self) -> None:
        if self._socket is not None and self._server is not None:
            self._socket.close()
            self._socket = None
            self._server.wait(10)


class Interpreters:
    """As `ForkServer`, with a new interpreter for every rank: slower, and nothing is inherited."""

    def __init__(self) -> None:
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def fork(self, connection: int, output: int, lent: Mapping[int, int]) -> int:
        """Start a rank and return its process id; `lent` descriptors keep their numbers there."""
        descriptors = [connection, output, *lent, *lent.values()]
        process = subprocess.Popen(
            [sys.executable, "-m", _SERVER, "--rank", *map(str, descriptors)],
            pass_fds=[connection, output, *lent.values()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_search_path())},
        )
        self._started[process.pid] = process
        return process.pid

    def reap(self, pid: int) -> int:
        """The exit code of a rank that has ended: negative for a signal."""
        return self._started.pop(pid).wait()

    def close(self) -> None:
        """Nothing is left once every rank has been reaped."""


class Process:
    """One rank, from fork to exit code."""

    def __init__(
        self,
        server: ForkServer | Interpreters,
        rank: int,
        job: Job,
        lent: Mapping[int, int],
    ) -> None:
        self.rank = rank
        self.exit_code: int | None = None
        self._server = server
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, theirs = Pipe()
        with theirs:
            self.pid = server.fork(theirs.fileno(), self._output.fileno(), lent)
        self._exit = os.pidfd_open(self.pid)
        self._connection.send_bytes(pickle.dumps(job))

    @property
    def output(self) -> str:
        """What the rank has written to its standard output and error so far."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def fileno(self) -> int:
        """Readable when the rank has said or returned something, or has died."""
        return self._connection.fileno()

    def say(self, value: Any) -> None:
        """Tell the rank something: what its `here.hear` returns."""
        try:
            self._connection.send_bytes(pickle.dumps(value))
        except ConnectionError:
            raise self.failure(f"ended with exit code {self.wait()} before it heard") from None

    def hear(self, timeout: float = 30) -> Any:
        """What the rank says next by `here.say`."""
        what, value = self._report(time.monotonic() + timeout)
        if what != here.SAID:
            raise self.failure(f"{what} {value} where it should have said something")
        return value

    def result(self, timeout: float = 30) -> Any:
        """What the rank's function returns; raises what it raised as `RankFailure`."""
        what, value = self._report(time.monotonic() + timeout)
        if what != here.RETURNED:
            raise self.failure(f"{what}\n{value}")
        return value

    def _report(self, deadline: float) -> tuple[str, Any]:
        if not self._connection.poll(max(0.0, deadline - time.monotonic())):
            raise self.hung()
        try:
            report: tuple[str, Any] = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            code = self.wait(max(1.0, deadline - time.monotonic()))
            raise self.failure(f"ended with exit code {code} before it returned") from None
        return report

    def ends(self, within: float) -> bool:
        """Whether the rank has ended or does so in `within` seconds."""
        return self.exit_code is not None or bool(select.select([self._exit], [], [], within)[0])

    def wait(self, timeout: float = 30) -> int:
        """The exit code: negative for a signal."""
        if self.exit_code is None:
            if not self.ends(timeout):
                raise self.hung()
            self.exit_code = self._server.reap(self.pid)
        return self.exit_code

    def signal(self, number: int) -> None:
        """Send a signal to the rank, as `os.kill` does."""
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop the rank (SIGSTOP), and wait until all its threads are."""
        self.signal(signal.SIGSTOP)
        self._await(lambda: stopped(self.pid), "does not stop")

    def resume(self) -> None:
        """Let a stopped rank go on."""
        self.signal(signal.SIGCONT)

    def sleeping(self) -> None:
        """Wait until the main thread of the rank blocks in the operating system."""
        stat = Path(f"/proc/{self.pid}/stat")
        self._await(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", "does not block")

    def prints(self, text: str) -> None:
        """Wait until the output of the rank contains `text`."""
        self._await(lambda: text in self.output, f"does not print {text!r}")

    def _await(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            if time.monotonic() >= deadline:
                raise self.failure(complaint)
            time.sleep(0.01)

    def hung(self) -> RankFailure:
        """The failure of a rank that does not come to an end; its output has all stacks."""
        before = len(self.output)
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while len(self.output) == before and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.failure("does not come to an end")

    def failure(self, what: str) -> RankFailure:
        return RankFailure(
            f"rank {self.rank} {what}\n--- output of rank {self.rank}\n{self.output}"
        )

    def close(self) -> None:
        """End the rank and whatever it has forked."""
        if self.exit_code is None:
            self.signal(signal.SIGKILL)
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.wait()
        os.close(self._exit)
        self._connection.close()
        self._output.close()


class Ranks:
    """Runs module-level functions as the ranks of a job that ``torchrun`` might have started.

    Every run has fresh processes, an environment of its own (``RANK`` and so on, a
    store that outlives each rank, traffic over loopback), and leaves nothing
    behind once `end_processes` was called.  Ranks are forked from a process that has imported
    `preload`; without `fork` each is a new interpreter.  With a `launcher` that has a
    command they are ranks of its job.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        *,
        fork: bool = True,
        launcher: Launcher | None = None,
    ) -> None:
        self._server = ForkServer(preload) if fork else Interpreters()
        self._launcher = launcher
        self._launches: list[Launch] = []
        self._stores: list[TCPStore] = []
        self._processes: list[Process] = []

    def spawn(
        self,
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        finalize: bool = True,
    ) -> list[Process]:
        """Start ``function(*arguments)`` on `size` ranks.

        Each ends as a Python program does; without `finalize` it runs its exit
        handlers and saves the time that taking the interpreter down costs.  A rank
        of a launcher always ends as a program.
        """
        launch = self._launch(size)
        places = launch.places if launch else [Place({}, {})] * size
        number = pickle.dumps(self._launcher.rank) if self._launcher and launch else b""
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        processes = []
        for rank, place in enumerate(places):
            job = Job(
                path=_search_path(),
                module=function.__module__,
                function=function.__qualname__,
                arguments=pickle.dumps(arguments),
                finalize=finalize or launch is not None,
                number=number,
                environment={
                    **place.environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "RANKS_STORE": f"{LOOPBACK}:{store.port}",
                    **(environment or {}),
                },
            )
            processes.append(Process(self._server, rank, job, place.descriptors))
            self._processes.append(processes[-1])
        if launch:
            launch.started()
            for process in processes:
                process.rank = process.hear()
            processes.sort(key=lambda process: process.rank)
        return processes

    def _launch(self, size: int) -> Launch | None:
        command = self._launcher.command(size) if self._launcher else ()
        if not command:
            return None
        self._launches.append(Launch(command, size))
        return self._launches[-1]

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        timeout: float = 30,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """What ``function(*arguments)`` returns on each of `size` ranks.

        Fails, naming the rank, if one raises, does not return within `timeout`
        seconds, or ends with another exit code than 0 after it has returned.
        """
        __tracebackhide__ = True
        processes = self.spawn(function, size, *arguments, environment=environment, finalize=False)
        results = collect(processes, timeout)
        for process in processes:
            if process.wait(timeout) != 0:
                raise process.failure(f"returned, and ended with exit code {process.exit_code}")
        return results

    def end_processes(self) -> None:
        """Kill every rank that still runs."""
        while self._processes:
            self._processes.pop().close()
        while self._launches:
            self._launches.pop().close()
        self._stores.clear()

    def close(self) -> None:
        self.end_processes()
        self._server.close()


def collect(processes: Sequence[Process], timeout: float = 30) -> list[Any]:
    """The results of `processes`; the first that fails, in time, fails all.

    Others that fail within a second of it are reported as well: the first may only have
    met what went wrong on another.
    """
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: list[RankFailure] = []
    pending = list(processes)
    while pending:
        ready = select.select(pending, [], [], max(0.0, deadline - time.monotonic()))[0]
        if failures and not ready:
            break
        for process in ready or list(pending):
            pending.remove(process)
            try:
                results[process.rank] = process.result(0)
            except RankFailure as failure:
                if not failures:
                    deadline = min(deadline, time.monotonic() + _AFTERMATH)
                failures.append(failure)
    if failures:
        raise RankFailure("\n\n".join(map(str, failures)))
    return [results[process.rank] for process in processes]


def _search_path() -> list[str]:
    """The search path of this process, so that ranks find what it finds."""
    return [path or os.getcwd() for path in sys.path]
