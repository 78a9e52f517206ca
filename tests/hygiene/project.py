"""Folder of a hygiene run: prompts that are numbers, settings, and the command of each role."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.chaos.project import _write_model
from workers.launch.specs import COMMANDS, ENGINE
from workers.settings import Settings
from workers.settings.toml_file import parse_settings

HERE = Path(__file__).parent
ARCHIVE_MB = 8


def write_project(folder: Path, groups: int) -> Settings:
    """Write model and prompts; returns the settings of a run on them."""
    (folder / "model").mkdir(parents=True)
    _write_model(folder / "model")
    with (folder / "prompts.jsonl").open("w") as file:
        for row in range(groups):
            file.write(json.dumps({"prompt": [{"role": "user", "content": str(row)}], "number": row}) + "\n")
    return parse_settings(
        {
            "run": {"name": "hygiene", "folder": str(folder / "run")},
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "prompts.jsonl"), "max_queued_prompts": 64},
            "rewards": [{"ref": f"{HERE / 'ends.py'}:reward"}],
            "rollout": {"workers": 2, "groups_in_flight": 16, "group_size": 2}
            | {"max_tokens": 16, "max_tokens_per_turn": 16},
            "score": {"workers": 2},
            "train": {"batch_size": 32, "publish_every": 2, "save_every": 4},
            "archive": {"keep": ARCHIVE_MB},
        }
    )


def commands() -> AbstractContextManager[Any]:
    """Start each role with a counter inside it, and the scripted engine, while the context is open."""
    roles = {role: (str(HERE / "role.py"), role) for role in ("feed", "rollout", "score", "train")}
    return patch.dict(COMMANDS, {**roles, ENGINE: (str(HERE / "engine.py"),)})
