"""``commlayer demo`` as a user runs it: processes over a real backend, with the toy model."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commlayer_demo.launch import run_stages
from commlayer_demo.model import LayerWeights
from commlayer_demo.schedule import Limits
from commlayer_demo.weights import RandomSource, toy
from commlayer_demo.worker import Job

from commlayer.config import CommConfig
from commlayer.errors import CommError
from commlayer.pipeline.topology import FoldedTopology, LinearTopology

PROMPTS = ["one", "a longer prompt, of more than one chunk", "", "four", "five"]
TOY = ["--model", "toy", "--max-tokens", "12"]


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "commlayer.cli", "demo", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def figures(*arguments: str) -> dict[str, Any]:
    done = demo(*TOY, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_stages_answer_like_one_process_and_are_measured(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("\n".join(PROMPTS[1:]))
    done = demo(
        *TOY,
        *("--prompt", PROMPTS[0], "--prompt-file", str(tmp_path / "prompts")),
        *("--micro-batch", "2", "--rounds", "2"),
    )
    assert done.returncode == 0, done.stderr
    assert "tokens identical: yes" in done.stdout
    assert re.search(r"tokens per second( +[\d.]+ \([\d.]+–[\d.]+\)){3}", done.stdout)
    for stage in (0, 1):
        assert re.search(rf"idle share, stage {stage}( +\d+% \(\d+%–\d+%\)){{2}}", done.stdout)
    for prompt in filter(None, PROMPTS):
        assert f"> {prompt}" in done.stdout


def test_three_stages_and_another_batching(tmp_path: Path) -> None:
    config = tmp_path / "commlayer.toml"
    config.write_text('backend = "gloo"\nname = "demo-test"\nmax_inflight_ops = 3\n')
    arguments = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    arguments += ["--in-flight", "4", "--prefill-chunk", "7"]
    document = figures(*arguments, "--stages", "3", "--rounds", "1", "--config", str(config))
    assert document["tokens_identical"] is True
    assert document["layers"] == [[0, 3], [3, 6], [6, 8]]
    assert document["tokens"] == sum(answer["tokens"] for answer in document["answers"])
    assert 0 < document["broadcasts"] < document["steps"]
    assert min(document["peak_bytes_in_flight"]) > 0
    for mode in ("overlapped", "blocking"):
        assert all(0 <= share["median"] <= 1 for share in document[mode]["idle_share"])


def test_folded_over_two_ranks_with_two_virtual_stages_each(tmp_path: Path) -> None:
    config = tmp_path / "commlayer.toml"
    config.write_text("max_inflight_ops = 2\n")
    arguments = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    arguments += ["--topology", "folded", "--rounds", "1", "--config", str(config)]
    document = figures(*arguments)
    assert document["tokens_identical"] is True
    assert document["layers"] == [[0, 2], [2, 4], [4, 6], [6, 8]]
    assert document["ranks"] == [[0, 3], [1, 2]]
    assert 0 < document["broadcasts"] < document["steps"]
    assert len(document["overlapped"]["idle_share"]) == 2


def test_the_topology_adds_its_channels_and_unbounds_the_folds() -> None:
    job = Job(
        source=toy(),
        prompts=((1,),),
        limits=Limits(4, 1, 1, 16),
        topology=FoldedTopology(2, 3),
        rounds=0,
        config=CommConfig(channels=("mine", "fold"), unbounded_channels=("mine",)),
    )
    assert job.connection.channels == ("mine", "fold", "data", "fold2")
    assert job.connection.unbounded_channels == ("mine", "fold", "fold2")


def test_folded_over_three_ranks_as_a_reader_sees_it() -> None:
    done = demo(*TOY, "--topology", "folded", "--stages", "3", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "tokens identical: yes" in done.stdout
    assert "idle share, rank 2" in done.stdout
    assert re.search(r"layers by rank: 0–\d and \d–7, ", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "9"], "8 layers cannot be split over 9 stages"),
        (["--topology", "folded", "--stages", "5"], "Use --stages 4 or fewer"),
        (["--prompt", "x" * 5000], "Shorten the prompt"),
    ],
)
def test_what_the_model_cannot_do_is_said_at_once(arguments: list[str], words: str) -> None:
    done = demo(*TOY, *arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_key_in_the_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("backnd = 'gloo'\n")
    done = demo(*TOY, "--config", str(tmp_path / "c.toml"))
    assert done.returncode == 1
    assert "'backend'" in done.stderr


@dataclasses.dataclass(frozen=True)
class Troubled(RandomSource):
    """Its last layer, which the last stage loads, is trouble."""

    trouble: str = ""

    def layer(self, index: int) -> LayerWeights:
        if index == self.config.layers - 1:
            if self.trouble == "raises":
                raise ValueError("bad layer")
            if self.trouble == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "interrupts":
                os.kill(os.getppid(), signal.SIGINT)
        return super().layer(index)


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        ("raises", CommError, "rank 1 failed: bad layer"),
        ("dies", CommError, "the process of rank 1 died"),
        ("interrupts", KeyboardInterrupt, None),
    ],
)
def test_when_a_rank_fails_or_the_user_interrupts_no_process_is_left(
    trouble: str, error: type[BaseException], words: str | None
) -> None:
    healthy = toy()
    job = Job(
        source=Troubled(healthy.config, healthy.seed, trouble),
        prompts=((1, 2, 3),),
        limits=Limits(4, 1, 1, 16),
        topology=LinearTopology(2),
        rounds=0,
        config=CommConfig.load({"backend": "gloo"}),
    )
    with pytest.raises(error, match=words):
        run_stages(job, lambda phase, done, total: None)
    assert multiprocessing.active_children() == []
