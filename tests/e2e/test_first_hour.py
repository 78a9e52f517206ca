"""The first hour of a newcomer: README's first commands on a fresh clone, then `docs/first-hour.md`, block by block."""

import json
import os
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest

from workers.settings.toml_file import parse_settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-hour.md"
SET_UP_S, COMMANDS_S = 1500, 900


class Block(NamedTuple):
    """A block of code of a page."""

    language: str
    text: str
    before: str
    """The text between the previous block and this one."""


def blocks_of(page: Path) -> list[Block]:
    """Return the page's blocks of code, in order."""
    text, found, end = page.read_text(), list[Block](), 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        found.append(Block(match[1], match[2], text[end : match.start()]))
        end = match.end()
    return found


def write(block: Block, folder: Path) -> None:
    """Write a block to the file that the sentence before it names, or replace the method that it begins with."""
    file = folder / re.findall(r"`(\w+\.(?:py|toml))`", block.before)[-1]
    head = block.text.partition("(")[0]
    if head.startswith("    def "):
        old = file.read_text()
        file.write_text(old[: old.index(head)] + block.text)  # the method is the class's last one
    else:
        file.write_text(block.text)


def test_the_page_pays_for_the_wrong_thing_until_it_is_mended(tmp_path):
    def earned(*calls: tuple[object, ...]) -> float:
        machine = runpy.run_path(str(tmp_path / "coffee.py"))["CoffeeMachine"]()
        machine.reset()
        for name, *arguments in calls:
            getattr(machine, str(name))(*arguments)
        return sum(machine.get_reward().values())

    rewards = []
    for block in (each for each in blocks_of(PAGE) if each.language == "python"):
        write(block, tmp_path)
        rewards.append((earned(*[("wash",)] * 4), earned(("wash",), ("grind", 7), ("brew", "espresso"))))
    assert rewards == [(2.0, 1.5), (0.5, 1.5)]


def test_the_pages_settings_are_valid():
    (settings,) = [each.text for each in blocks_of(PAGE) if each.language == "toml"]
    assert parse_settings(tomllib.loads(settings))


class Newcomer:
    """Types commands in a shell, with the clone's virtual environment activated once it exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path: list[str] = []

    def type(self, commands: str, timeout_s: float) -> str:
        """Run the lines of a block; returns what they printed. The next block begins in the folder where this ends."""
        search = os.pathsep.join([*self.path, os.environ["PATH"]])
        ran = subprocess.run(
            ["sh", "-e", "-c", f"{commands}\npwd"],
            cwd=self.folder,
            env={**os.environ, "PATH": search},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        print(commands, ran.stdout)
        assert ran.returncode == 0, f"{commands}\n{ran.stdout}"
        printed, _, folder = ran.stdout.rstrip("\n").rpartition("\n")
        self.folder = Path(folder)
        return printed


@pytest.mark.full
@pytest.mark.timeout(2 * SET_UP_S + 3 * COMMANDS_S)
def test_from_a_clone_to_a_wrong_reward_found_and_mended(tmp_path, request):
    request.addfinalizer(lambda: shutil.rmtree(tmp_path / "penstock", ignore_errors=True))  # gigabytes of packages
    user = Newcomer(tmp_path)
    (first, *_) = [each.text for each in blocks_of(ROOT / "README.md") if each.language == "sh"]
    user.type(first.replace("<this repository>", f"--quiet {ROOT}"), SET_UP_S)
    clone = user.folder
    user.path = [str(clone / ".venv" / "bin")]
    user.folder = tmp_path
    printed = ""
    for block in blocks_of(clone / "docs" / "first-hour.md"):
        if block.language == "sh":
            printed += user.type(block.text, COMMANDS_S)
        elif block.language:
            write(block, user.folder)
    assert "It is usable: no errors, no warnings." in printed
    assert "8 episodes" in printed
    wrong, mended = (rewards_of(file) for file in sorted((user.folder / "runs").glob("*/metrics.jsonl")))
    assert rises(wrong["env.clean"]) > 0.5
    assert rises(wrong["env.served"]) < 0, "the wrong reward is to be seen"
    assert re.search(r"its part env\.served fell .* and env\.clean rose", printed), printed
    assert rises(mended["env.served"]) > 0.15
    assert fmean(mended["env.clean"][-5:]) <= 0.5


def rewards_of(file: Path) -> dict[str, list[float]]:
    """Return the mean of each reward part in each step of a run."""
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    return {name: [step[f"reward/part/{name}/mean"] for step in steps] for name in ("env.served", "env.clean")}


def rises(values: list[float]) -> float:
    """How far the mean of the last five steps is above that of the first three."""
    return fmean(values[-5:]) - fmean(values[:3])
