"""Code blocks on the pages are what they say: Python that compiles, commands and options that exist, valid data.

Two pages are executed as printed: `README.md` (tests/e2e/test_readme.py) and `docs/first-hour.md`
(tests/e2e/test_first_hour.py). Settings are loaded by test_docs_settings.py. A block whose code is another project's
has a reason in `FOREIGN`.
"""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import yaml

from workers.cli import penstock

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "envs" / "adapters" / "README.md"]
PAGES += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
LANGUAGES = {"python", "sh", "toml", "json", "yaml", "text", ""}
"""A block of `text`, or without a language, is output or a drawing."""
OURS = ("stream", "envs", "workers")
FOREIGN = {
    "docs/coming-from-trl.md:1": "TRL's arguments, beside ours",
    "docs/coming-from-verl.md:1": "verl's command, beside ours",
    "docs/coming-from-pipelinerl.md:1": "PipelineRL's command, beside ours",
}
"""Blocks of other projects, with the reason why they are not checked."""


USERS_OWN = {"envs/till.py", "tests/test_till.py"}
"""Files of the example's own project."""


class Block(NamedTuple):
    """A block of code; `where` is the page and the number of the block on it."""

    where: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    found = [
        Block(f"{page.relative_to(ROOT)}:{number}", match[2], textwrap.dedent(match[3]))
        for page in PAGES
        for number, match in enumerate(
            re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", page.read_text(), re.DOTALL | re.MULTILINE), 1
        )
    ]
    return [block for block in found if block.language in languages and block.where not in FOREIGN]


def test_every_block_has_a_language_that_is_checked_or_is_marked():
    every = re.findall(r"^ *```(\w+)$", "\n".join(page.read_text() for page in PAGES), re.MULTILINE)
    assert set(every) <= LANGUAGES
    assert len(every) > 150


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.where)
def test_python_compiles_and_its_imports_exist(block):
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OURS):
            module = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize("block", blocks("json", "yaml"), ids=lambda block: block.where)
def test_data_is_valid(block):
    if block.language == "yaml":
        assert yaml.safe_load(block.text)
    else:
        decoder, text = json.JSONDecoder(), block.text.strip()
        while text:  # one object, or one for each line
            _, end = decoder.raw_decode(text)
            text = text[end:].strip()


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    for line in lines:
        for part in re.split(r"\s(?:&&|\|\||\||;|&)(?:\s|$)", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def check_penstock(words: list[str]) -> None:
    """Parse a command line of `penstock`; an unknown command or option raises."""
    command: click.Command = penstock
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_parser(click.Context(command, help_option_names=["-h", "--help"])).parse_args(words)


@pytest.mark.parametrize("block", blocks("sh"), ids=lambda block: block.where)
def test_commands_and_options_exist(block):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(block.text):
        program = words[0].rpartition("/")[2]
        if program == "penstock":
            check_penstock(words[1:])
        elif program == "make":
            assert {word for word in words[1:] if "=" not in word} <= set(targets)
        elif program in ("python", "pytest"):
            files = [word for word in words[1:] if word.startswith(("docs/", "tests/", "benchmarks/", "examples/"))]
            assert all((ROOT / file).exists() for file in files), files


def test_a_wrong_command_is_seen():
    for line in ("penstock runs a.toml", "penstock run --seed 3 a.toml", "penstock dead buried 7"):
        (words,) = commands(line)
        with pytest.raises((AssertionError, click.NoSuchOption)):
            check_penstock(words[1:])


def test_every_reason_belongs_to_a_block():
    for where in FOREIGN:
        page, _, number = where.rpartition(":")
        assert (ROOT / page).read_text().count("\n```\n") >= int(number)


def test_files_in_code_of_the_pages_exist():
    tracked = set(
        subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    )
    folders = {str(parent) for name in tracked for parent in Path(name).parents}
    named = {
        (page.name, name.rstrip("/"))
        for page in PAGES
        for name in re.findall(
            r"`((?:stream|envs|workers|tests|deploy|benchmarks|plugins)/[\w./-]+)`", page.read_text()
        )
    }
    assert len(named) > 50
    assert not {each for each in named if each[1] not in tracked | folders | USERS_OWN}


def test_messages_of_the_troubleshooting_page_are_in_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.split("## By message\n")[1].split("\n## ")[0]
    messages = [
        text for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)
    ]
    assert len(messages) >= 8
    code = "".join(file.read_text() for package in OURS for file in (ROOT / package).rglob("*.py"))
    joined = re.sub(r"\"\s*\n\s*f?\"", "", code)  # a message over several lines
    assert not [message for message in messages if message not in joined]
