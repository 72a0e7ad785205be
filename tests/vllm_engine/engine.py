"""One run of the engine: ``python engine.py PLAN``, a JSON object; prints a JSON object last.

A plan has ``model`` (a folder), ``stages``, ``commlayer`` (the table of
``additional_config``, or null for the stock engine), ``sequences`` (most in one
batch) and ``rounds``: a list of calls of ``generate``, each with ``prompts``,
``prompt_tokens`` (shortest and longest), ``tokens`` and ``seed``.  Optional are
``tensor_ranks``, ``batch_tokens``, and ``kill``: the number of the stage that is
killed in the middle of one more call.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from small_model import POSITIONS, VOCABULARY

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def prompts_of(round_: dict[str, Any]) -> list[dict[str, Any]]:
    """Random prompts, the same for the same seed."""
    source = random.Random(round_["seed"])
    shortest, longest = round_["prompt_tokens"]
    return [
        {
            "prompt_token_ids": [
                source.randrange(3, VOCABULARY) for _ in range(source.randint(shortest, longest))
            ]
        }
        for _ in range(round_["prompts"])
    ]


def engine_of(plan: dict[str, Any]) -> Any:
    from vllm import LLM

    table = plan["commlayer"]
    return LLM(
        model=plan["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        max_model_len=POSITIONS,
        max_num_seqs=plan["sequences"],
        max_num_batched_tokens=plan.get("batch_tokens", 4096),
        pipeline_parallel_size=plan["stages"],
        tensor_parallel_size=plan.get("tensor_ranks", 1),
        distributed_executor_backend="mp",
        compilation_config={"mode": 2, "backend": "eager"},
        enable_prefix_caching=False,
        disable_log_stats=True,
        additional_config={} if table is None else {"commlayer": table},
        worker_extension_cls="engine_worker.Probe",
    )


def run(plan: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    llm = engine_of(plan)
    result: dict[str, Any] = {"tokens": [], "seconds": []}
    llm.collective_rpc("watch")
    for round_ in plan["rounds"]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=round_["tokens"], ignore_eos=True, detokenize=False
        )
        prompts = prompts_of(round_)
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        result["seconds"].append(time.perf_counter() - start)
        result["tokens"].append([list(output.outputs[0].token_ids) for output in outputs])
        result.setdefault("workers", []).append(llm.collective_rpc("report"))
    if "kill" in plan:
        result["killed"] = killed(llm, plan, result["workers"][-1])
    return result


def killed(llm: Any, plan: dict[str, Any], workers: list[dict[str, Any]]) -> dict[str, Any]:
    """What becomes of a call of ``generate`` of which one stage is killed."""
    from vllm import SamplingParams

    victim = next(worker["pid"] for worker in workers if worker["stage"] == plan["kill"])
    sampling = SamplingParams(
        temperature=0.0, max_tokens=POSITIONS // 2, ignore_eos=True, detokenize=False
    )
    prompts = prompts_of({"seed": 5, "prompts": 64, "prompt_tokens": [3, 40]})
    threading.Timer(2.0, os.kill, (victim, signal.SIGKILL)).start()
    start = time.perf_counter()
    try:
        llm.generate(prompts, sampling, use_tqdm=False)
    except Exception as error:
        return {"error": type(error).__name__, "seconds": time.perf_counter() - start}
    return {"error": None}


def main() -> None:
    os.environ.update({key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()})
    result = run(json.loads(sys.argv[1]))
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
