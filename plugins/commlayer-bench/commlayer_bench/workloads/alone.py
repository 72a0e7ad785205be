"""What the library costs without a transport: a handle on a null backend, and its import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

from commlayer.semantics import Poll
from commlayer_bench.contender import Contender
from commlayer_bench.contenders.commlayer import MODES, known
from commlayer_bench.payloads import one_tensor
from commlayer_bench.workload import Case, Here, Scale, Turn, Workload


class NullHandle(Workload):
    """A send of 64 bytes that is complete at once: handle made, waited and reaped."""

    name = "handle"
    title = "A handle made, completed and reaped on a null backend"
    axis = ""
    metrics: ClassVar[Mapping[str, str]] = {"handle": "s", "dropped": "s"}
    count = 2000

    def worlds(self, scale: Scale) -> Sequence[int]:
        return (1,)

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        return [Case("completion polled", 0), Case("completion waited for by a lane", 1)]

    def turns(
        self, case: Case, contenders: Sequence[Contender], here: Here
    ) -> Sequence[tuple[str, Turn]]:
        poll = Poll.NEVER_BEFORE_WAIT if case.x else Poll.EXACT
        return [(name, self._turn(poll, name, here)) for name in MODES if known(name)]

    def _turn(self, poll: Poll, name: str, here: Here) -> Turn:
        from commlayer_bench.null import connected

        tensor = one_tensor(64)

        def turn() -> Mapping[str, float]:
            with connected(poll, **MODES[name]) as comm:
                for _ in range(100):
                    comm.isend(tensor, 1).wait()
                begin = here.now()
                for _ in range(self.count):
                    comm.isend(tensor, 1).wait()
                waited = here.now()
                for _ in range(self.count):
                    comm.isend(tensor, 1)
                comm.drain()
                dropped = here.now()
            return {
                "handle": (waited - begin) / self.count,
                "dropped": (dropped - waited) / self.count,
            }

        return turn


class Import(Workload):
    """Seconds that importing takes in a fresh interpreter that has imported torch."""

    name = "import"
    title = "Import, on top of torch"
    axis = ""
    metrics: ClassVar[Mapping[str, str]] = {"time": "s"}

    STATEMENTS: ClassVar[Mapping[str, str]] = {
        "import commlayer": "import commlayer",
        "import commlayer, and first use of connect": "import commlayer; commlayer.connect",
    }

    def worlds(self, scale: Scale) -> Sequence[int]:
        return (1,)

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        cases = [Case(label, x) for x, label in enumerate(self.STATEMENTS)]
        return cases[-1:] if scale is Scale.tiny else cases

    def turns(
        self, case: Case, contenders: Sequence[Contender], here: Here
    ) -> Sequence[tuple[str, Turn]]:
        program = (
            "import time, torch; begin = time.perf_counter(); "
            f"{self.STATEMENTS[case.label]}; print(time.perf_counter() - begin)"
        )

        def turn() -> Mapping[str, float]:
            command = [sys.executable, "-c", program]
            return {"time": float(subprocess.check_output(command, text=True))}

        return [("commlayer", turn)]
