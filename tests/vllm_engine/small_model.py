"""A small Llama with random weights, made on the spot."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512
POSITIONS = 2048


def make(folder: Path, layers: int = 8) -> None:
    """Write a model of `layers` layers into `folder`.

    The weights are wide enough (standard deviation 0.1) for different prompts to
    give different tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)


if __name__ == "__main__":
    import sys

    make(Path(sys.argv[1]))
