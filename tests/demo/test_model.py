"""The decoder: split, chunked and batched computation give what the whole gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from commlayer_demo.launch import run_alone
from commlayer_demo.model import ModelConfig, Span, Stage, split_layers
from commlayer_demo.schedule import Limits
from commlayer_demo.weights import RandomSource, load_stages, toy
from commlayer_demo.worker import Job

from commlayer.pipeline.topology import LinearTopology

SOURCE = toy()
PROMPT = torch.tensor([256, *b"The quick brown fox jumps"])


def whole() -> Stage:
    (stage,) = load_stages(SOURCE, [range(SOURCE.config.layers)])
    return stage


def logits(stages: list[Stage], prompt: torch.Tensor, chunk: int) -> torch.Tensor:
    caches = [stage.new_cache(len(prompt)) for stage in stages]
    rows = []
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        hidden = stages[0].embed(part)
        for stage, cache in zip(stages, caches, strict=True):
            hidden = stage.forward(hidden, [Span(cache, start, len(part))])
        rows.append(stages[-1].logits(hidden))
    return torch.cat(rows)


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_stages_compute_exactly_what_the_whole_model_computes(stages: int) -> None:
    split = load_stages(SOURCE, split_layers(SOURCE.config, stages))
    expected = logits([whole()], PROMPT, len(PROMPT))
    assert torch.equal(logits(split, PROMPT, len(PROMPT)), expected)


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(chunk: int) -> None:
    expected = logits([whole()], PROMPT, len(PROMPT))
    torch.testing.assert_close(logits([whole()], PROMPT, chunk), expected, rtol=1e-4, atol=1e-4)


def test_requests_computed_together_do_not_see_each_other() -> None:
    stage = whole()
    prompts = [PROMPT, PROMPT[:7].flip(0)]
    spans = [Span(stage.new_cache(len(prompt)), 0, len(prompt)) for prompt in prompts]
    together = stage.logits(stage.forward(stage.embed(torch.cat(prompts)), spans))
    alone = torch.cat([logits([stage], prompt, len(prompt)) for prompt in prompts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def generate(source: RandomSource, prompt: list[int], tokens: int = 24) -> list[int]:
    config = dataclasses.replace(source.config, stop_tokens=())
    job = Job(
        source=dataclasses.replace(source, config=config),
        prompts=(tuple(prompt),),
        limits=Limits(tokens, 1, 1, 16),
        topology=LinearTopology(1),
        rounds=0,
        config=None,  # type: ignore[arg-type]
    )
    return run_alone(job, lambda *_: None)[0][0]


def test_toy_tokens_depend_on_every_prompt_token() -> None:
    prompt = PROMPT.tolist()
    expected = generate(SOURCE, prompt)
    assert len(set(expected)) > 12
    for position in range(len(prompt)):
        changed = [*prompt]
        changed[position] = (changed[position] + 1) % 256
        assert generate(SOURCE, changed) != expected, position


@dataclasses.dataclass(frozen=True)
class Damaged(RandomSource):
    """One layer is another one."""

    damaged: int = 0

    def layer(self, index: int):  # type: ignore[no-untyped-def]
        return super().layer(index if index != self.damaged else self.config.layers + 100)


def test_toy_tokens_depend_on_every_layer() -> None:
    prompt = PROMPT.tolist()
    expected = generate(SOURCE, prompt)
    for layer in range(SOURCE.config.layers):
        assert generate(Damaged(SOURCE.config, SOURCE.seed, layer), prompt) != expected, layer


SMALL = ModelConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    norm_eps=1e-5,
    rope_theta=1e5,
    context=8192,
    stop_tokens=(2,),
)


@pytest.mark.parametrize("config", [SOURCE.config, SMALL], ids=["toy", "smollm2"])
def test_every_split_covers_all_layers_once_and_leaves_no_stage_empty(config: ModelConfig) -> None:
    for stages in range(1, config.layers + 1):
        split = split_layers(config, stages)
        assert len(split) == stages
        assert all(len(layers) > 0 for layers in split)
        assert [i for layers in split for i in layers] == list(range(config.layers))


def test_the_last_stage_gets_fewer_layers_for_its_share_of_the_vocabulary() -> None:
    assert [len(layers) for layers in split_layers(SMALL, 2)] == [19, 11]


@pytest.mark.parametrize("stages", [0, 9])
def test_a_split_that_is_impossible_is_refused(stages: int) -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        split_layers(SOURCE.config, stages)
