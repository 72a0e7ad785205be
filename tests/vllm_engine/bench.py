"""``make bench-vllm``: the stock engine and the engine with commlayer, interleaved.

``python bench.py [--rounds N] [--stages 2,4] [--only coordinator|engine] [--json FILE]``
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import bench_coordinator
from runs import EngineRuns

WORK = {
    "prefill": {"prompts": 32, "prompt_tokens": [900, 1000], "tokens": 1, "seed": 3},
    "decode": {"prompts": 16, "prompt_tokens": [4, 8], "tokens": 128, "seed": 4},
}
"""Long prompts and one token each; short prompts and many tokens."""

ENGINES: dict[str, dict[str, Any]] = {
    "stock": {"commlayer": None},
    "stock over gloo": {"commlayer": None, "shared_memory": False},
    "commlayer": {"commlayer": {}},
}

Sample = dict[str, float]


def engines(rounds: int, stages: Sequence[int]) -> dict[str, dict[str, list[Sample]]]:
    """Samples by work and stages, then by engine; engines take turns, one at a time."""
    results: dict[str, dict[str, list[Sample]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = EngineRuns(Path(folder))
        for number in range(rounds):
            for size in stages:
                names = list(ENGINES)
                for name in names if number % 2 else reversed(names):
                    plan = {"stages": size, "sequences": 8, "batch_tokens": 2048}
                    # Each kind of work once to warm up, then measured.
                    rounds_ = [work for work in WORK.values() for _ in range(2)]
                    result, _ = run(timeout=900, rounds=rounds_, **plan, **ENGINES[name])
                    for index, work in enumerate(WORK):
                        key = f"{work}, {size} stages"
                        samples = results.setdefault(key, {}).setdefault(name, [])
                        samples.append(_sample(result, 2 * index + 1))
                        print(f"{key}, {name}: {samples[-1]}", file=sys.stderr, flush=True)
    return results


def _sample(result: dict[str, Any], number: int) -> Sample:
    work = list(WORK.values())[number // 2]
    before, after = (result["workers"][i][0]["steps"] for i in (number - 1, number))
    seconds = result["seconds"][number]
    produced = sum(map(len, result["tokens"][number]))
    prompt = work["prompts"] * sum(work["prompt_tokens"]) / 2 if work["tokens"] == 1 else 0
    return {
        "tokens per second": (produced + prompt) / seconds,
        "ms per step": 1e3 * seconds / (after - before),
    }


def show(results: dict[str, dict[str, list[Sample]]]) -> None:
    """Medians and ranges.  How many steps the same work takes is the scheduler's choice."""
    print("\n| work | engine | tokens per second | to stock | ms per step |")
    print("| --- | --- | ---: | ---: | ---: |")
    for work, by_engine in results.items():
        base = statistics.median(s["tokens per second"] for s in by_engine["stock"])
        for name, samples in by_engine.items():
            step = [sample["ms per step"] for sample in samples]
            rate = [sample["tokens per second"] for sample in samples]
            print(
                f"| {work} | {name} | {_range(rate, '.0f')} "
                f"| {statistics.median(rate) / base:.2f} | {_range(step, '.1f')} |"
            )


def _range(values: Sequence[float], form: str) -> str:
    text = f"{statistics.median(values):{form}}"
    return f"{text} ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--turns", type=int, default=15, help="turns of each coordinator")
    parser.add_argument("--stages", default="2,4", help="numbers of pipeline stages")
    parser.add_argument("--only", choices=["coordinator", "engine"])
    parser.add_argument("--table", type=json.loads, default={}, help="settings of commlayer")
    parser.add_argument("--json", type=Path, help="file for all samples")
    options = parser.parse_args()
    ENGINES["commlayer"]["commlayer"] = options.table
    results: dict[str, Any] = {"machine": f"{platform.machine()}, {platform.platform()}"}
    if options.only != "engine":
        tables = {
            "stock": None,
            "safe": options.table,
            "direct": {**options.table, "wait_mode": "direct"},
        }
        results["coordinator"] = bench_coordinator.measure(options.turns, tables)
        bench_coordinator.show(results["coordinator"])
    if options.only != "coordinator":
        stages = [int(size) for size in options.stages.split(",")]
        results["engine"] = engines(options.rounds, stages)
        show(results["engine"])
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
