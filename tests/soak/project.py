"""The folder of a soak run: prompts that are numbers, a tokenizer of digits, settings, and the roles' programs."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.soak.ends import GROUP_SIZE, REFUSED, VOCABULARY, intended
from workers.launch.specs import COMMANDS, ENGINE, ProcessSpec, role_specs
from workers.settings import Settings
from workers.settings.toml_file import parse_settings

HERE = Path(__file__).parent
ROLE_PROGRAM, ENGINE_PROGRAM, ENDS = (str(HERE / name) for name in ("role.py", "engine.py", "ends.py"))
END = 10
"""Token that ends a turn; 0 to 9 are digits."""
ASKED = "asked.txt"
"""File in the run's folder: the number of every request that the engine received, one per line."""
ENGINE_DELAY_S = 0.01
_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'nobody' -%}{{- raise_exception('nobody may speak here') -}}{%- endif -%}
{{- message.content -}}
{%- endfor -%}
"""


def write_project(folder: Path, groups: int | Sequence[int], seed: int = 1, **sections: Any) -> Settings:
    """Write model and prompts; returns the settings of a run on them.

    Args:
        folder: where; the run's own folder is `run` in it. If `model` is there already, it stays.
        groups: how many prompts, or their numbers, each of which has its intended end.
        seed: `run.seed`.
        sections: settings that are added to a section, or replace it if they are not a table.
    """
    if not (folder / "model").exists():
        _write_model(folder / "model")
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(groups) if isinstance(groups, int) else groups:
            role = "nobody" if intended(number) == REFUSED else "user"
            file.write(json.dumps({"prompt": [{"role": role, "content": str(number)}], "number": number}) + "\n")
    table: dict[str, Any] = {
        "run": {"name": "soak", "folder": str(folder / "run"), "seed": seed, "dashboard": "off"},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl"), "max_queued_prompts": 32},
        "rewards": [{"ref": f"{ENDS}:reward"}],
        "rollout": {"workers": 2, "groups_in_flight": 4, "group_size": GROUP_SIZE}
        | {"max_tokens": 16, "max_tokens_per_turn": 16},
        "score": {"workers": 2},
        "train": {"batch_size": 8, "save_every": 3},
        # Budgets are the defaults: a kill from outside is charged neither to a process nor to a prompt.
        "queue": {"lease_s": 2.0},
        "abort": {"max_invalid_fraction": 0.6, "stall_timeout_s": 120.0},
    }
    for name, section in sections.items():
        table[name] = table.get(name, {}) | section if isinstance(section, dict) else section
    return parse_settings(table)


def commands(settings: Settings, **others: tuple[str, ...]) -> AbstractContextManager[Any]:
    """Start a witness as the trainer, the scripted engine, and these other programs, while the context is open."""
    engine = (ENGINE_PROGRAM, "--asked", str(settings.folder / ASKED), "--delay", str(ENGINE_DELAY_S))
    return patch.dict(COMMANDS, {"train": (ROLE_PROGRAM, "train"), ENGINE: engine, **others})


def roles(settings: Settings, file: Path, redis: str, engines: tuple[str, ...]) -> list[ProcessSpec]:
    """Return the command lines of `penstock run`, with the witness as the trainer's learner."""
    with commands(settings):
        return role_specs(settings, file, redis, engines)


def _write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    digits = {str(digit): digit for digit in range(END)}
    tokenizer = Tokenizer(models.WordLevel({**digits, "<end>": END}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END, "vocab_size": VOCABULARY}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
