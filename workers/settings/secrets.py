"""Secrets from the environment, or from files that it names: Docker, Kubernetes and systemd mount secrets as files."""

import json
import os
from pathlib import Path
from typing import Final

from stream.errors import SettingsError

REDIS: Final = "PENSTOCK_REDIS"
DASHBOARD_TOKEN: Final = "PENSTOCK_DASHBOARD_TOKEN"  # noqa: S105  (the name of a variable)
SECRETS: Final = (REDIS, DASHBOARD_TOKEN)


def read_secret(name: str) -> str:
    """Return the variable NAME, or else the text of the file that NAME_FILE names, without white space around it.

    Empty if neither is set.

    Raises:
        SettingsError: the file cannot be read, or is empty.
    """
    if value := os.environ.get(name, ""):
        return value
    file = os.environ.get(f"{name}_FILE", "")
    if not file:
        return ""
    try:
        text = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name}_FILE={file}: cannot be read: {error}") from error
    if not text:
        raise SettingsError(f"{name}_FILE={file}: the file is empty; write the secret into it")
    return text


def without_secrets() -> dict[str, str]:
    """Return variables that hide this process's secrets from a child process that does not need them."""
    return {variable: "" for name in SECRETS for variable in (name, f"{name}_FILE")}


def max_positions(folder: Path) -> int:
    """Return the longest sequence that a model was made for; 0 if its folder does not say."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return int(config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
