"""Every settings block on a page is accepted, on top of the least settings that a run needs."""

import re
import tomllib
from pathlib import Path

import pytest

from workers.settings.toml_file import parse_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for folder in ("docs", "envs", "examples") for path in (ROOT / folder).rglob("*.md"))
BLOCKS = {
    f"{page.relative_to(ROOT)}:{number}": block
    for page in PAGES
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL), start=1)
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_settings_is_accepted(name):
    table = tomllib.loads(BLOCKS[name])
    data = table.get("data", {})
    least = {
        "model": {"path": "model"},
        "data": {} if {"sets", "rows"} & data.keys() else {"path": "prompts.jsonl"},
        "environments": {name: f"games.py:{name.title()}" for name in ("calculator", "maze", "sudoku")},
        "rewards": [{"ref": "rewards.py:exact"}],
    }
    sections = {key: least[key] | table.get(key, {}) for key in ("model", "data", "environments")}
    assert parse_settings(least | table | sections, name)


def test_there_are_blocks():
    assert len(BLOCKS) >= 25
