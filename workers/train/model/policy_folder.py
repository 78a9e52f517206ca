"""The policy on disk: a folder in Hugging Face form."""

import shutil
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from workers.local_engine.weights import load_model

TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "*processor_config.json",
)
"""Tokenizer and processor files, copied from the base model's folder."""
_LARGEST_FILE: Final = "5GB"


def load_policy(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load the model in a folder, without dropout, on the CPU.

    Raises:
        SettingsError: the folder holds no model, or an incomplete one.
    """
    return load_model(folder, "causal model", dtype)


def save_policy(model: Any, weights: dict[str, Tensor], base: Path, folder: Path, dtype_name: str) -> None:
    """Write config, weights, generation config and the tokenizer's files into an existing folder.

    Weights go to `model.safetensors`, or for a large model to several such files and an index.

    Args:
        model: the policy; it may be sharded.
        weights: its full tensors on the CPU; tied ones share memory.
        base: the folder that it was loaded from, with the tokenizer's files.
        folder: target.
        dtype_name: of the weights, `float32` or `bfloat16`.
    """
    model.save_pretrained(folder, state_dict=weights, max_shard_size=_LARGEST_FILE)
    config = folder / "config.json"
    described = msgspec.json.decode(config.read_bytes()) | {"dtype": dtype_name}
    config.write_bytes(msgspec.json.format(msgspec.json.encode(described)))
    for pattern in TOKENIZER_FILES:
        for path in base.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
