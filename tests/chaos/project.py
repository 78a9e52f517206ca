"""Folder of a chaos run: prompts that are numbers, a tokenizer of digits, settings, and the command of each role."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.chaos.ends import GROUP_SIZE, REFUSED, intended
from workers.launch.specs import COMMANDS, ENGINE, ProcessSpec, role_specs
from workers.settings import Settings
from workers.settings.toml_file import parse_settings

HERE = Path(__file__).parent
END = 10
"""Token that ends a turn; 0 to 9 are digits."""
LEASE_S = 2.0
ASKED = "asked.txt"
"""File in the run's folder: the row of every request that the engine received, one per line."""
WITNESS = (str(HERE / "trainer.py"),)
"""Python's arguments that start the trainer with a witness as its learner."""
_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'nobody' -%}{{- raise_exception('nobody may speak here') -}}{%- endif -%}
{{- message.content -}}
{%- endfor -%}
"""


def write_project(folder: Path, groups: int, seed: int, fsync: str = "everysec") -> Settings:
    """Write model and prompts; returns the settings of a run on them."""
    (folder / "model").mkdir(parents=True)
    _write_model(folder / "model")
    with (folder / "prompts.jsonl").open("w") as file:
        for row in range(groups):
            role = "nobody" if intended(row) == REFUSED else "user"
            file.write(json.dumps({"prompt": [{"role": role, "content": str(row)}], "number": row}) + "\n")
    return parse_settings(
        {
            "run": {"name": "chaos", "folder": str(folder / "run"), "seed": seed, "dashboard": "off"},
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "prompts.jsonl"), "max_queued_prompts": 32},
            "rewards": [{"ref": f"{HERE / 'ends.py'}:reward"}],
            "rollout": {"workers": 2, "groups_in_flight": 4, "group_size": GROUP_SIZE}
            | {"max_tokens": 16, "max_tokens_per_turn": 16},
            "score": {"workers": 2},
            "train": {"batch_size": 8, "save_every": 3},
            # Budgets are the defaults: a kill from outside is charged neither to a process nor to a prompt.
            "queue": {"lease_s": LEASE_S, "fsync": fsync},
            "abort": {"max_invalid_fraction": 0.6, "stall_timeout_s": 120.0},
        }
    )


def commands(settings: Settings, **others: tuple[str, ...]) -> AbstractContextManager[Any]:
    """Start a witness as the trainer, the scripted engine, and these other programs, while the context is open."""
    engine = (str(HERE / "engine.py"), "--asked", str(settings.folder / ASKED))
    return patch.dict(COMMANDS, {"train": WITNESS, ENGINE: engine, **others})


def roles(settings: Settings, file: Path, redis: str, engines: tuple[str, ...]) -> list[ProcessSpec]:
    """Return the command lines of `penstock run`, with the witness as the trainer's learner."""
    with commands(settings):
        return role_specs(settings, file, redis, engines)


def _write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    digits = {str(digit): digit for digit in range(END)}
    tokenizer = Tokenizer(models.WordLevel({**digits, "<end>": END}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
