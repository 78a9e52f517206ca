"""Make policies of a few thousand parameters."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from workers.train.model import trainable_model


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


@contextmanager
def loaded_once() -> Iterator[None]:
    """Read a small model's files once while this is open, and again if they change: it takes as long as a step.

    Every learner still has a model of its own.
    """
    load = trainable_model.load_policy
    loaded: dict[tuple[object, ...], Any] = {}

    def copied(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        files = [(path, path.stat()) for path in sorted(folder.glob("*"))]
        key = (folder, dtype, *((path, at.st_ino, at.st_size, at.st_mtime_ns) for path, at in files))
        if key not in loaded:
            loaded[key] = load(folder, dtype)
        return copy.deepcopy(loaded[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainable_model, "load_policy", copied)
        yield
