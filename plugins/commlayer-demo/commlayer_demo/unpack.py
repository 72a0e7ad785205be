"""Read a packed (GGUF) checkpoint of the Llama family with transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commlayer_demo.model import LayerWeights, ModelConfig
from commlayer_demo.weights import Unpacked

_MARK = "\N{REPLACEMENT CHARACTER}message\N{REPLACEMENT CHARACTER}"


def unpack(file: Path) -> Unpacked:
    """The checkpoint as float32 tensors, its tokenizer and its chat template.

    Works without a network.  Raises ModuleNotFoundError when transformers, gguf
    or accelerate is not installed.
    """
    import accelerate  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    import gguf  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    import transformers  # type: ignore[import-not-found, unused-ignore]

    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    weights = model.state_dict()
    config = model.config
    return Unpacked(
        config=_config(config, (tokenizer.eos_token_id,)),
        layers=[_layer(weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)],
        embedding=_plain(weights["model.embed_tokens.weight"]),
        final_norm=_plain(weights["model.norm.weight"]),
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        template=_template(tokenizer),
    )


def _config(config: Any, stop_tokens: tuple[int, ...]) -> ModelConfig:
    supported = (
        config.model_type == "llama"
        and config.tie_word_embeddings
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] == "default"
    )
    if not supported:
        raise ValueError(f"not a plain Llama decoder with tied embeddings: {config}")
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        context=config.max_position_embeddings,
        stop_tokens=stop_tokens,
    )


def _layer(weights: dict[str, Tensor], prefix: str) -> LayerWeights:
    def stacked(*names: str) -> Tensor:
        return torch.cat([weights[f"{prefix}{name}.weight"] for name in names])

    return LayerWeights(
        attention_norm=_plain(weights[f"{prefix}input_layernorm.weight"]),
        qkv=stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_out=_plain(weights[f"{prefix}self_attn.o_proj.weight"]),
        mlp_norm=_plain(weights[f"{prefix}post_attention_layernorm.weight"]),
        gate_up=stacked("mlp.gate_proj", "mlp.up_proj"),
        down=_plain(weights[f"{prefix}mlp.down_proj.weight"]),
    )


def _plain(weight: Tensor) -> Tensor:
    return weight.detach().contiguous()


def _template(tokenizer: Any) -> tuple[str, str]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split(_MARK)
    return before, after
