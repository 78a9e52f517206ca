"""The first hour of a newcomer, from the README alone: clone, demo, own environment trained, group inspected in the
browser, a run stopped and resumed. The commands come from README.md, index.md and first-hour.md.
"""

import json
import re
import runpy
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean

import pytest

from tests.e2e.browser import Browser, open_browser
from tests.e2e.reader import Reader
from tests.pages import ROOT, Block, blocks_of, lines_of
from workers.settings.toml_file import parse_settings

PAGE = ROOT / "docs" / "first-hour.md"
SET_UP_S, COMMANDS_S = 1500, 900


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
    assert rewards == [(2.4, 1.6), (0.6, 1.6)]


def test_the_pages_settings_are_valid():
    (settings,) = [each.text for each in blocks_of(PAGE) if each.language == "toml"]
    assert parse_settings(tomllib.loads(settings))


class Stages:
    """How long each stage of a newcomer's way takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def table(self) -> str:
        rows = [*self.seconds.items(), ("together", sum(self.seconds.values()))]
        return "\n".join(["minutes  stage", *(f"{seconds / 60:7.1f}  {name}" for name, seconds in rows)])


@pytest.fixture
def newcomer(tmp_path) -> Iterator[Reader]:
    clone = tmp_path / "home" / "penstock"
    clone.parent.mkdir()
    reader = Reader(clone.parent, logs=tmp_path)
    yield reader
    reader.leave()
    shutil.rmtree(clone, ignore_errors=True)  # gigabytes of packages


@pytest.mark.full
@pytest.mark.timeout(2 * SET_UP_S + 5 * COMMANDS_S)
def test_from_a_clone_to_a_run_inspected_and_resumed(newcomer, tmp_path, capsys):
    stages = Stages()
    with stages.stage("clone, set-up and demo, watched from a second terminal"):
        clone_and_demo(newcomer, tmp_path)
    blocks = iter(blocks_of(newcomer.folder / "docs" / "first-hour.md"))
    newcomer.folder = newcomer.folder.parent
    with stages.stage("own environment written, checked and played"):
        assert "It is usable: no errors, no warnings." in (printed := follow(newcomer, blocks, "penstock play"))
        assert "8 episodes" in printed
    with stages.stage("own environment trained"):
        printed = follow(newcomer, blocks, "penstock run")
        assert re.search(r"its part env\.served fell .* and env\.clean rose", printed), printed
    with stages.stage("conversations read"):
        assert "env.clean" in follow(newcomer, blocks, "penstock groups")
    with stages.stage("group inspected in the browser"):
        missing = inspect_a_group(newcomer)
    with stages.stage("reward mended, trained again"):
        follow(newcomer, blocks, "penstock show")
    wrong, mended = (rewards_of(file) for file in sorted((newcomer.folder / "runs").glob("*/metrics.jsonl")))
    with stages.stage("run stopped and resumed, audit clean"):
        stop_and_resume(newcomer)
    with capsys.disabled():
        print(f"\n{stages.table()}")
    assert rises(wrong["env.clean"]) > 0.5
    assert rises(wrong["env.served"]) < 0, "the wrong reward is to be seen"
    assert rises(mended["env.served"]) > 0.15
    assert fmean(mended["env.clean"][-5:]) <= 0.6
    if missing:
        pytest.skip(f"all but the browser: {missing}")


def clone_and_demo(newcomer: Reader, logs: Path) -> None:
    """Follow README's first two blocks and index.md; ends in the clone, with `penstock` on the PATH."""
    clone_and_train, look_and_resume = map(lines_of, (block.text for block in blocks_of(ROOT / "README.md", "sh")))
    clone, demo = clone_and_train
    after = [line for line in look_and_resume if "runs/demo" in line]
    second_terminal = look_and_resume[: -len(after)]
    newcomer.type(clone.replace("<this repository>", f"--quiet {ROOT}"), COMMANDS_S)
    demo_run = newcomer.leave_running(demo)
    demo_run.wait_until(lambda: steps(newcomer.folder / "runs") >= 2, SET_UP_S)
    (logs / "second").mkdir()
    watching = Reader(newcomer.folder, logs=logs / "second")
    try:
        printed = watching.type("\n".join(second_terminal), COMMANDS_S)
    finally:
        watching.leave()
    assert "limited by" in printed
    assert "calculator" in printed
    assert demo_run.process.wait(COMMANDS_S) == 0, demo_run.printed
    scores = json.loads((newcomer.folder / "runs" / "demo" / "summary.json").read_text())
    assert scores["score_after"] - scores["score_before"] > 0.3
    newcomer.type(second_terminal[0], COMMANDS_S)  # puts `penstock` on the PATH
    newcomer.type("\n".join(after), COMMANDS_S)
    typed = {*clone_and_train, *second_terminal}
    assert {line for block in blocks_of(ROOT / "docs" / "index.md", "sh") for line in lines_of(block.text)} <= typed


def follow(newcomer: Reader, blocks: Iterator[Block], last: str) -> str:
    """Type and write the next blocks of a page, up to the one that has a command with this beginning."""
    printed = ""
    for block in blocks:
        if block.language == "sh":
            printed += newcomer.type(block.text, COMMANDS_S)
            if any(line.startswith(last) for line in lines_of(block.text)):
                return printed
        elif block.language:
            write(block, newcomer.folder)
    raise AssertionError(f"the page has no more `{last}`")


def operating(command: str) -> str:
    """Return the README's line with a command."""
    return next(
        line for block in blocks_of(ROOT / "README.md", "sh") for line in lines_of(block.text) if command in line
    )


def inspect_a_group(newcomer: Reader) -> str:
    """Find a group in the dashboard by clicking; returns why it could not be done: there is no browser."""
    newcomer.type(operating("penstock dashboard"), COMMANDS_S)
    address = newcomer.background[-1].address()
    try:
        with open_browser() as browser:
            click_through(browser, address)
    except pytest.skip.Exception as missing:
        return str(missing)
    finally:
        newcomer.leave()
    return ""


def click_through(browser: Browser, address: str) -> None:
    def click(selector: str, then: Callable[[str], bool]) -> str:
        browser.wait(lambda: browser.find(selector)).click()
        return browser.wait(lambda: browser.text if then(browser.text) else "")

    browser.show(1440, "light")
    browser.open(address)  # the only run's page
    text = browser.wait(lambda: browser.text if "env.served" in browser.text else "")
    assert "coffee-" in text
    assert "finished" in text
    browser.picture("newcomer-run")
    text = click("nav a[href$='/groups']", lambda text: "coffee:0:" in text)
    text = click("tbody a[href*='/group?']", lambda text: "Side by side" in text)
    browser.picture("newcomer-group")
    assert re.search(r"A coffee of \d+ grams, please\.", text)
    assert re.search(r"\b(wash|grind|brew)\b", text)
    assert "env.clean" in text
    assert "advantage" in text


def stop_and_resume(newcomer: Reader) -> None:
    """Stop a new run with Ctrl-C after three steps, and do what it says then."""
    run = newcomer.leave_running("penstock run coffee.toml")

    runs = newcomer.folder / "runs"
    run.wait_until(lambda: "new run" in run.printed and steps(runs) == 3, COMMANDS_S)
    assert run.press_ctrl_c() == 0, run.printed
    (resume, folder) = re.findall(r"`(penstock run (\S+))` resumes", run.printed)[-1]
    made = steps(runs)
    printed = newcomer.type(resume, COMMANDS_S)
    assert re.search(rf"resuming run \S+ at step {made}\b", printed), printed
    assert steps(runs) > made
    newcomer.type(operating("penstock audit").replace("runs/demo", folder), COMMANDS_S)


def steps(runs: Path) -> int:
    """Return how many steps the newest run in a folder has made."""
    with suppress(FileNotFoundError, ValueError):
        return len((max(runs.iterdir()) / "metrics.jsonl").read_text().splitlines())
    return 0


def rewards_of(file: Path) -> dict[str, list[float]]:
    """Return the mean of each reward part in each step of a run."""
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    return {name: [step[f"reward/part/{name}/mean"] for step in steps] for name in ("env.served", "env.clean")}


def rises(values: list[float]) -> float:
    """How far the mean of the last five steps is above that of the first three."""
    return fmean(values[-5:]) - fmean(values[:3])
