"""Every settings block on a page is accepted, on top of the least settings that a run needs."""

import tomllib

import pytest

from tests.pages import all_blocks
from workers.settings.toml_file import parse_settings

BLOCKS = {block.where: block.text for block in all_blocks("toml") if block.page != "README.md"}
"""The README's are tested in tests/e2e/test_readme.py."""


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
