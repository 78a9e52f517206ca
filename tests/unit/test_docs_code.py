"""Code blocks on the pages are what they say: Python that runs, commands and options that exist, valid data.

`tests/pages.py` says which test runs a block as printed; here is what can be known of all blocks in a moment. Settings
are loaded by test_docs_settings.py.
"""

import ast
import importlib
import itertools
import json
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from tests.pages import PAGES, PYTHON_RUN_BY, READERS_FILES, ROOT, RUN_BY, Block, all_blocks, blocks_of, lines_of
from workers.cli import penstock

LANGUAGES = {"python", "sh", "toml", "json", "yaml", "text", ""}
"""A block of `text`, or without a language, is output or a drawing."""
OURS = ("penstock", "stream", "envs", "workers")
RUNNABLE = {"cd", "curl", "jq", "penstock", "pytest", "python", "redis-server"}
"""Programs that tests/e2e/test_docs_commands.py can run."""
RESULTS = {"--out", "--perfetto", ">"}
"""Before the name of a file that a command writes."""
USERS_OWN = {"envs/till.py", "tests/test_till.py"}
"""Files of the example's own project."""


def name_of(block: Block) -> str:
    return block.where


def test_every_block_has_a_language_that_is_checked():
    assert {block.language for block in all_blocks()} <= LANGUAGES
    assert len(all_blocks()) > 200


def test_a_reason_not_to_run_stands_directly_before_its_block():
    for page in PAGES:
        marks = re.findall(r"^ *<!-- not run:", page.read_text(), re.MULTILINE)
        assert len(marks) == sum(bool(block.reason_not_to_run) for block in blocks_of(page)), page


def test_a_block_that_is_neither_marked_nor_run_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("A\n<!-- not run: it is large -->\n```sh\nkubectl a\n```\nB\n```sh\nkubectl b\n```\n")
    marked, unmarked = blocks_of(page)
    assert marked.reason_not_to_run == "it is large"
    assert what_cannot_be_run(unmarked) == ["kubectl"]


@pytest.mark.parametrize("key", sorted({*RUN_BY, *PYTHON_RUN_BY}))
def test_a_test_that_is_said_to_run_a_block_exists_and_names_the_page(key):
    page, _, begin = key.partition(": ")
    assert any(block.text.startswith(begin) for block in blocks_of(ROOT / page, "sh", "python"))
    for test in {RUN_BY.get(key), PYTHON_RUN_BY.get(key)} - {None}:
        code = (ROOT / test).read_text()
        assert Path(page).name in code or Path(page).parent.name in code, f"{test} does not name {page}"


def what_cannot_be_run(block: Block) -> list[str]:
    """Return the programs of a block that no test can run, and the files that the tests' reader lacks."""
    found = []
    for words in commands(block.text):
        program, *rest = words
        if program not in RUNNABLE:
            found.append(program)
        for before, word in zip(words, rest, strict=False):
            path = re.sub(r"^([\w/]+\.py):\w+$", r"\1", word)
            if reference := re.fullmatch(r"([\w.]+):[A-Za-z]\w*", path):
                path = f"{reference[1].replace('.', '/')}.py"  # such as envs.till:Till
            is_path = re.fullmatch(r"[\w.-]+/[\w./-]+|[\w-]+\.(?:py|toml|jsonl)", path)
            if program == "penstock" and is_path and before not in RESULTS and path not in READERS_FILES:
                found.append(word)
    return found


@pytest.mark.parametrize("block", all_blocks("sh"), ids=name_of)
def test_a_block_of_commands_is_marked_or_can_be_run(block):
    assert not (block.reason_not_to_run and block.run_by), "marked, and run all the same"
    if not (block.reason_not_to_run or block.run_by or block.page.startswith("examples")):
        assert not what_cannot_be_run(block), "write `<!-- not run: REASON -->` before the block, or have a test run it"


@pytest.mark.parametrize("block", all_blocks("python"), ids=name_of)
def test_python_runs_and_its_imports_exist(block):
    tree = ast.parse(textwrap.dedent(block.text))  # it may be a method
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OURS):
            module = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, f"{node.module} has no {missing}"
    if not (block.reason_not_to_run or block.run_by):
        names: dict[str, object] = {}
        exec(compile(tree, block.where, "exec"), names)
        assert any(callable(value) for name, value in names.items() if not name.startswith("__"))


@pytest.mark.parametrize("block", all_blocks("json", "yaml"), ids=name_of)
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
    for line in lines_of(text):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        for is_operator, part in itertools.groupby(lexer, lambda word: word in ("&&", "||", "|", ";", "&")):
            words = list(part)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words and not is_operator:
                yield words


def check_penstock(words: list[str]) -> None:
    """Parse a command line of `penstock`; an unknown command or option raises."""
    command: click.Command = penstock
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_parser(click.Context(command, help_option_names=["-h", "--help"])).parse_args(words)


@pytest.mark.parametrize("block", all_blocks("sh"), ids=name_of)
def test_commands_options_targets_and_files_exist(block):
    """A path that begins with `penstock/` is in a reader's clone."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    other = ("runs", "envs", "penstock")  # on pages, a folder of the reader's, or the clone
    folders = tuple(f"{path.name}/" for path in ROOT.iterdir() if path.is_dir() and path.name not in other)
    for words in commands(block.text):
        program = words[0].rpartition("/")[2]
        if program == "penstock":
            check_penstock(words[1:])
        elif program == "make":
            assert {word for word in words[1:] if "=" not in word} <= set(targets)
        files = [word.removeprefix("./") for word in words if word.removeprefix("./").startswith(folders)]
        # A reader's clone is the folder penstock/.
        missing = [file for file in files if not (ROOT / file.removeprefix("penstock/")).exists()]
        assert not missing


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "charts" / "penstock" / "alerts.yml"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_in_sentences_exist(page):
    for command in re.findall(r"(?<!`)`(penstock [^`]+)`(?!`)", page.read_text()):
        if command != "penstock COMMAND --help":
            (words,) = commands(re.sub(r"\\?\|--\w+", "", command))  # of alternatives the first
            check_penstock(words[1:])


def test_a_wrong_command_is_seen():
    for line in ("penstock ruin a.toml", "penstock run --seed 3 a.toml", "penstock dead buried 7"):
        (words,) = commands(line)
        with pytest.raises((AssertionError, click.NoSuchOption)):
            check_penstock(words[1:])


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
    code = "".join(
        file.read_text() for package in OURS for kind in ("*.py", "*.lua") for file in (ROOT / package).rglob(kind)
    )
    joined = re.sub(r"\"\s*\n\s*f?\"", "", code)  # a message over several lines
    assert not [message for message in messages if message not in joined]
