"""Folder of a hygiene run: prompts that are numbers, settings, and the command of each role."""

import json
import sys
from pathlib import Path

from tests.chaos.project import _write_model
from workers.run.role_specs import ENGINE, RoleSpec, role_specs
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


def roles(settings: Settings, file: Path, redis: str, engines: tuple[str, ...]) -> list[RoleSpec]:
    """Return the command lines of `penstock run`, each with a counter inside the process."""
    addresses = ("--redis", redis, *(part for url in engines for part in ("--engine", url)))
    return [
        RoleSpec(
            role=spec.role,
            index=spec.index,
            command=(sys.executable, str(HERE / "role.py"), spec.role, str(file), *addresses),
        )
        for spec in role_specs(settings, file, redis, engines)
    ]


def engine(_settings: Settings, _file: Path, port: int) -> RoleSpec:
    """Return the scripted engine, which replaces the local one."""
    return RoleSpec(role=ENGINE, command=(sys.executable, str(HERE / "engine.py"), "--port", str(port)))
