"""``commlayer demo``: a language model over several processes, checked and measured."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from commlayer_testkit.commands.topology import Shape
from commlayer_tools.output import JSON, print_json

if TYPE_CHECKING:
    from commlayer.config import CommConfig
    from commlayer_demo.text import Tokenizer
    from commlayer_demo.weights import Progress, Source

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What do bees make?",
    "Name three colours.",
)


class Model(str, Enum):
    """What answers."""

    SMOLLM2 = "smollm2"
    TOY = "toy"


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    model: Annotated[
        Model, typer.Option(help="SmolLM2-135M-Instruct, or a small one with random weights.")
    ] = Model.SMOLLM2,
    stages: Annotated[int, typer.Option(min=2, help="Processes to split the layers over.")] = 2,
    topology: Annotated[
        Shape,
        typer.Option(help="One stage a process, or two: up the processes and back down."),
    ] = Shape.LINEAR,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to ask; may be repeated.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="One prompt per line.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 32,
    micro_batch: Annotated[int, typer.Option(min=1, help="Requests that travel together.")] = 1,
    in_flight: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-batches in flight; twice the stages if not given."),
    ] = None,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt computed at once.")
    ] = 16,
    rounds: Annotated[
        int, typer.Option(min=0, help="Pairs of an overlapped and a blocking run to measure.")
    ] = 3,
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Configuration (TOML).")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for unpacked weights (0.6 GB).")
    ] = None,
    json: bool = JSON,
) -> None:
    """Answer prompts with a model split by layers over processes.

    Activations go on fire-and-forget, sampled tokens come back by asynchronous
    broadcasts.  The tokens are compared with those of a single process (exit code
    1 if they differ), and the run with one that waits for each operation.
    """
    from commlayer_demo import figures, launch, screen, weights
    from commlayer_demo.schedule import Limits
    from commlayer_demo.worker import Job

    comm_config = _config(config)
    prompts = [*(prompt or ()), *_lines(prompt_file)] or list(PROMPTS)
    with screen.ProgressLine() as progress:
        source, tokenizer = _model(model, cache or weights.cache_root(), progress)
        job = Job(
            source=source,
            prompts=tuple(tuple(tokenizer.encode(text)) for text in prompts),
            limits=Limits(max_tokens, micro_batch, in_flight or 2 * stages, prefill_chunk),
            topology=topology.of(stages),
            rounds=rounds,
            config=comm_config,
        )
        job.check()
        reports = launch.run_stages(job, progress)
        alone = launch.run_alone(job, progress)
    result = figures.summarize(model.value, job, prompts, tokenizer.decode, reports, alone)
    if json:
        print_json(result)
    else:
        screen.show(result)
    if not result.tokens_identical:
        raise typer.Exit(1)


def _config(file: Path | None) -> CommConfig:
    from msgspec.structs import replace

    from commlayer.config import CommConfig

    config = CommConfig.load({"config": str(file)} if file else {})
    return replace(config, backend="gloo") if config.backend == "auto" else config


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line]


def _model(model: Model, cache: Path, progress: Progress) -> tuple[Source, Tokenizer]:
    from commlayer_demo import text, weights

    if model is Model.TOY:
        return weights.toy(), text.ByteTokenizer()
    source = weights.smollm2(cache, progress)
    return source, text.ChatTokenizer(source.folder)
