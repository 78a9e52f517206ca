"""What a model's `config.json` says, read without loading the model."""

import json
from pathlib import Path


def modeling_module(folder: Path) -> str:
    """Return the module of transformers with the code of a model, by its type; empty if its folder does not say.

    A type without code of its own has no such module.
    """
    try:
        kind = str(json.loads((folder / "config.json").read_bytes())["model_type"]).replace("-", "_")
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"transformers.models.{kind}.modeling_{kind}"


def max_positions(folder: Path) -> int:
    """Return the longest sequence that a model was made for; 0 if its folder does not say."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return int(config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
