"""A model's folder in Hugging Face form: all of a model is loaded, or none."""

from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from stream.errors import SettingsError

MODEL_CLASSES: Final = {
    "causal model": AutoModelForCausalLM,
    "sequence classifier": AutoModelForSequenceClassification,
}
_MAX_LISTED: Final = 3
"""Weights that a message lists."""


def load_model(folder: Path, kind: str, dtype: torch.dtype, **options: Any) -> Any:
    """The model in a folder, on the CPU, without dropout.

    Args:
        folder: has `config.json` and weights.
        kind: what it is for; one of `KINDS`.
        dtype: of the weights.
        options: of transformers' `from_pretrained`.

    Raises:
        SettingsError: there is none of that kind, or not all of one: what its files lack would begin as chance has it.
    """
    if not (folder / "config.json").is_file():
        raise SettingsError(f"{folder}: no config.json there; a model (model.path) is a folder in Hugging Face form")
    disable_progress_bar()
    try:
        model, said = MODEL_CLASSES[kind].from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
    except SafetensorError as error:
        raise SettingsError(f"{_unreadable(folder)}: not a whole safetensors file: {error}; copy it anew") from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise SettingsError(
            f"{folder}: transformers cannot load it as a {kind}: {why}; copy it anew, or set model.path to another"
        ) from error
    if missing := sorted(said["missing_keys"]):
        named = ", ".join(missing[:_MAX_LISTED]) + " and more" * (len(missing) > _MAX_LISTED)
        raise SettingsError(
            f"{folder}: it is no whole {kind}: {named} is not among its weights, and would begin as chance has it; "
            "copy it anew, or set model.path to another"
        )
    return model.eval()


def _unreadable(folder: Path) -> Path:
    """The first file of weights that is damaged; the folder, if none is."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file
    return folder
