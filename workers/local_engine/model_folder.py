"""Load a model from a folder in Hugging Face format; an incomplete folder is an error."""

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
"""Largest number of missing weights that an error message lists."""


def load_model(folder: Path, kind: str, dtype: torch.dtype, **options: Any) -> Any:
    """Load a model onto the CPU, in evaluation mode.

    Args:
        folder: folder with `config.json` and weights.
        kind: one of `MODEL_CLASSES`.
        dtype: data type of the weights.
        options: further arguments of transformers' `from_pretrained`.

    Raises:
        SettingsError: the folder holds no model of this kind, or weights are missing, which transformers would
            initialize at random.
    """
    if not (folder / "config.json").is_file():
        raise SettingsError(f"{folder} has no config.json; model.path must be a model folder in Hugging Face format")
    disable_progress_bar()
    try:
        model, loading_info = MODEL_CLASSES[kind].from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
    except SafetensorError as error:
        raise SettingsError(
            f"{_damaged_file(folder)}: not a complete safetensors file: {error}; copy it again"
        ) from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise SettingsError(
            f"{folder}: transformers cannot load it as a {kind}: {why}; copy it again, or "
            "set model.path to another folder"
        ) from error
    if missing := sorted(loading_info["missing_keys"]):
        listed = ", ".join(missing[:_MAX_LISTED]) + " and more" * (len(missing) > _MAX_LISTED)
        raise SettingsError(
            f"{folder}: not a complete {kind}: its files lack the weights {listed}; "
            "copy it again, or set model.path to another folder"
        )
    return model.eval()


def _damaged_file(folder: Path) -> Path:
    """Return the first damaged weight file; the folder if none is damaged."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file
    return folder
