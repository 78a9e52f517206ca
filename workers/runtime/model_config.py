"""What a model's `config.json` says, read without loading the model."""

import json
from pathlib import Path


def max_positions(folder: Path) -> int:
    """Return the longest sequence that a model was made for; 0 if its folder does not say."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return int(config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
