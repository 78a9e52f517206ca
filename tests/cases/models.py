"""Make policies of a few thousand parameters."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def write_small_qwen3(folder: Path, vocabulary: int, *, layers: int, tied: bool, hidden: int = 16) -> Path:
    """Write a model without a tokenizer, in Hugging Face form; the same arguments give the same weights."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(5)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
