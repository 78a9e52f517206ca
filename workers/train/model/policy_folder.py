"""The policy on disk: a folder in Hugging Face form, read and written."""

import shutil
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from workers.local_engine.model_folder import load_model

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
"""Files beside the weights that are copied from the base model's folder."""
_LARGEST_FILE: Final = "5GB"


def load_policy(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in a folder, without dropout, on the CPU.

    Raises:
        SettingsError: there is no model there, or not all of one.
    """
    return load_model(folder, "causal model", dtype)


def save_policy(model: Any, weights: dict[str, Tensor], base: Path, folder: Path, dtype_name: str) -> None:
    """Write config, weights, generation config and the tokenizer's files into an existing folder.

    Weights are in `model.safetensors`; those of a large model in several such files and an index of them.

    Args:
        model: the policy; it may be sharded.
        weights: its tensors, whole, on the CPU; those that are tied share memory.
        base: the folder it was loaded from, which has the tokenizer's files.
        folder: where to write.
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
