"""The pages of the reference that are generated from the code are current and complete."""

import functools
import runpy
from pathlib import Path

import click
import pytest

from workers.cli import penstock

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "records": "records",
    "algorithms": "algorithms",
    "commands": "commands",
    "log_events": "log-events",
    "http": "http",
}


@functools.cache
def generator(script):
    return runpy.run_path(str(DOCS / f"{script}_page.py"))


@pytest.mark.parametrize(("script", "page"), PAGES.items(), ids=PAGES)
def test_the_page_is_current(script, page):
    made = generator(script)["page"]()
    text = made if isinstance(made, str) else "\n".join(made) + "\n"
    assert text == (DOCS / f"{page}.md").read_text(), f"run: make reference (docs/{script}_page.py)"


def test_no_meaning_is_left_of_an_event_that_is_gone():
    page = generator("log_events")
    assert set(page["MEANINGS"]) == {call.event for call in page["log_calls"]()}


def test_every_command_and_option_is_described():
    walk = generator("commands")["commands"]
    names = dict(walk(penstock, "penstock"))
    assert len(names) > 30
    page = (DOCS / "commands.md").read_text()
    for name, command in names.items():
        assert f"### {name}\n" in page
        assert command.help, name
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert f"`{option.opts[0]}" in page or f", {option.opts[0]}" in page, f"{name} {option.opts}"
