"""A decoder of the Llama family, of which a process holds only its own layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder with tied embeddings, and the tokens that end a text."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    context: int
    stop_tokens: tuple[int, ...]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's matrices, float32, each of shape (outputs, inputs).

    `qkv` stacks the projections of all query, key and value heads; `gate_up`
    stacks the two input projections of the feed-forward part.
    """

    attention_norm: Tensor
    qkv: Tensor
    attention_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class KVCache:
    """Keys and values of one request in the layers of one stage, for up to `capacity` tokens."""

    def __init__(self, config: ModelConfig, layers: int, capacity: int) -> None:
        shape = (layers, 2, config.kv_heads, capacity, config.head_dim)
        self._entries = torch.empty(shape)

    def extend(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (kv_heads, n, head_dim) at positions `start` on; return all up to there."""
        end = start + keys.shape[1]
        all_keys, all_values = self._entries[layer]
        all_keys[:, start:end] = keys
        all_values[:, start:end] = values
        return all_keys[:, :end], all_values[:, :end]


@dataclass(frozen=True)
class Span:
    """`length` consecutive tokens of one request, from position `start`, and its cache."""

    cache: KVCache
    start: int
    length: int


class Stage:
    """A run of layers; the first stage also embeds tokens, the last one also predicts them.

    `embedding` is given on the first and on the last stage, `final_norm` on the
    last.  Rows of several requests are computed together, without padding: a
    batch is a (rows, hidden_size) tensor and the spans that its rows belong to.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[LayerWeights],
        *,
        embedding: Tensor | None = None,
        final_norm: Tensor | None = None,
    ) -> None:
        self.config = config
        self._layers = tuple(layers)
        self._embedding = embedding
        self._final_norm = final_norm
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = 1.0 / config.rope_theta**exponents

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(self.config, len(self._layers), capacity)

    def embed(self, tokens: Tensor) -> Tensor:
        """(rows,) int64 tokens to (rows, hidden_size)."""
        assert self._embedding is not None
        return F.embedding(tokens, self._embedding)

    def forward(self, hidden: Tensor, spans: Sequence[Span]) -> Tensor:
        """Run the layers over the rows of `spans`, which lie one after another in `hidden`."""
        rotation = self._rotation(spans)
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attention(index, layer, hidden, spans, rotation)
            hidden = hidden + self._feed_forward(layer, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) after the last layer to (rows, vocab_size)."""
        assert self._embedding is not None
        assert self._final_norm is not None
        return F.linear(self._norm(hidden, self._final_norm), self._embedding)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)

    def _rotation(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in spans])
        angles = torch.outer(positions.float(), self._frequencies).repeat(1, 2)
        return angles.cos()[:, None], angles.sin()[:, None]

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        spans: Sequence[Span],
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        config = self.config
        qkv = F.linear(self._norm(hidden, layer.attention_norm), layer.qkv)
        heads = qkv.view(len(hidden), -1, config.head_dim)
        rotated = _rotate(heads[:, : -config.kv_heads], rotation)
        queries, keys = rotated[:, : config.heads], rotated[:, config.heads :]
        values = heads[:, -config.kv_heads :]
        mixed = torch.empty_like(queries)
        row = 0
        for span in spans:
            rows = slice(row, row + span.length)
            past_keys, past_values = span.cache.extend(
                index, span.start, keys[rows].transpose(0, 1), values[rows].transpose(0, 1)
            )
            attended = F.scaled_dot_product_attention(
                queries[rows].transpose(0, 1)[None],
                past_keys[None],
                past_values[None],
                attn_mask=_causal_mask(span),
                enable_gqa=True,
            )
            mixed[rows] = attended[0].transpose(0, 1)
            row += span.length
        return F.linear(mixed.flatten(1), layer.attention_out)

    def _feed_forward(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of (rows, heads, head_dim), pairing i with i + head_dim / 2."""
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def _causal_mask(span: Span) -> Tensor | None:
    if span.length == 1:
        return None
    size = (span.length, span.start + span.length)
    return torch.ones(size, dtype=torch.bool).tril(diagonal=span.start)


def split_layers(config: ModelConfig, stages: int) -> list[range]:
    """Share the layers out so that stages take about equally long per token.

    The last stage also multiplies by the embedding, which is counted in layers.
    Raises ValueError when there are more stages than layers.
    """
    if not 1 <= stages <= config.layers:
        raise ValueError(f"{config.layers} layers cannot be split over {stages} stages")
    layer_size = config.hidden_size * (
        (2 * config.heads + 2 * config.kv_heads) * config.head_dim + 3 * config.intermediate_size
    )
    head = config.vocab_size * config.hidden_size / layer_size
    last = max(1, round((config.layers + head) / stages - head)) if stages > 1 else config.layers
    last = min(last, config.layers - stages + 1)
    ends = [(config.layers - last) * stage // max(stages - 1, 1) for stage in range(stages)]
    ends.append(config.layers)
    return [range(start, end) for start, end in pairwise(ends)]
