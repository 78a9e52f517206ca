"""The code blocks of `README.md` work as printed: environment, unit test, settings files, commands of a run."""

import json
import re
import shlex
import subprocess
import sys
import time
import tomllib

import pytest

from tests.e2e.harness import Project, balanced, environment, stop, summary_of
from tests.pages import ROOT, blocks_of
from workers.cli import penstock
from workers.settings.settings import sections
from workers.settings.toml_file import parse_settings

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("preloaded")]

README = (ROOT / "README.md").read_text()
REWARDS = """
import zlib


def exact(completions, answer, **columns):
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]
"""


def blocks(language: str) -> list[str]:
    """Return the page's code blocks in `language`, in order."""
    return [block.text for block in blocks_of(ROOT / "README.md", language)]


def commands() -> list[list[str]]:
    """Return the arguments of each `penstock` command on the page, without the comments behind them."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("penstock ")]


MINIMUM, ENVIRONMENTS, *_ = blocks("toml")
CLASS, UNIT_TEST = blocks("python")


@pytest.fixture
def user(tmp_path, random_model):
    """A folder with what the page's minimal settings file names."""
    project = Project(tmp_path, random_model)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my-policy").symlink_to(random_model)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "counter.py").write_text(CLASS)
    (tmp_path / "my.toml").write_text(MINIMUM)
    return project


def ask(project: Project, n: int) -> None:
    """Write `n` prompts with the columns that the page uses."""
    rows = [json.dumps({"question": f"Count, {i}.", "answer": str(i), "target": i % 5 + 1}) for i in range(n)]
    (project.folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def test_the_environment_is_checked_and_its_unit_test_passes(user):
    (command,) = [each for each in commands() if each[0] == "check"]
    checked = user.run(*command)
    assert checked.returncode == 0, checked.stderr
    assert "It is usable: no errors, no warnings." in checked.stdout
    (user.folder / "test_counter.py").write_text(UNIT_TEST)
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_counter.py"],
        cwd=user.folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "1 passed" in tested.stdout, tested.stdout + tested.stderr


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: re.search(r"\w+", block)[0])
def test_every_settings_block_is_valid_together_with_the_minimum(block):
    minimum, more = tomllib.loads(MINIMUM), tomllib.loads(block)
    both = {name: minimum[name] | more[name] for name in minimum.keys() & more.keys() if name != "rewards"}
    assert parse_settings(minimum | more | both)


def test_there_are_as_many_estimators_and_losses_as_it_says():
    kinds = sections()
    assert re.findall(r"one of (\d+)", README) == [str(len(kinds[name])) for name in ("estimator", "loss")]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_takes_its_arguments(user, monkeypatch, command):
    (user.folder / "runs" / "run").mkdir(parents=True)
    monkeypatch.chdir(user.folder)
    found, name, rest = penstock, "penstock", command
    while hasattr(found, "commands"):
        name, *rest = rest
        found = found.commands[name]
    assert found.make_context(name, rest, resilient_parsing=False)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_minimal_run_ends_and_its_policy_is_exported(user):
    ask(user, 16)
    summary = summary_of(user.run("run", "my.toml", "--json"), user)
    assert balanced(summary)
    assert (summary["fed"], summary["outstanding"], summary["completion_states"]) == (16, 0, {"valid": 128})
    exported = user.run(*next(each for each in commands() if each[0] == "export"))
    assert exported.returncode == 0, exported.stderr
    assert (user.folder / "my-policy-trained" / "model.safetensors").exists()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_is_operated_as_shown(user):
    """The run trains on the page's environment, with the page's estimator, loss and correction."""
    ask(user, 5000)
    learning = blocks("toml")[2]
    (user.folder / "my.toml").write_text(
        '[run]\nname = "my-run"\n' + MINIMUM + ENVIRONMENTS + learning[learning.index("[estimator]") :]
    )
    (operate,) = [block for block in blocks("sh") if "penstock queues" in block]
    shown = [shlex.split(line, comments=True)[1:] for line in operate.splitlines()]
    run = user.start("run", "my.toml", "--json")
    try:
        until_trained(user, run)
        for command in shown:
            if command[0] == "dashboard":
                serves_until_it_is_stopped(user.start(*command, "--port", "0"))
            elif command[0] != "replay":
                told = user.run(*command)
                assert told.returncode == 0, (command, told.stderr)
        for command in ("resume", "stop"):
            assert user.run(command).returncode == 0
        out, err = run.communicate(timeout=100)
    finally:
        stop(run)
    assert run.returncode == 0, err
    assert balanced(json.loads(out))
    replayed = user.run(*next(command for command in shown if command[0] == "replay"))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def serves_until_it_is_stopped(server: subprocess.Popen[str]) -> None:
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("listening on http://127.0.0.1:")
    finally:
        stop(server)


def until_trained(user: Project, run: subprocess.Popen[str]) -> None:
    """Wait until `penstock queues` shows a trained group."""
    deadline = time.monotonic() + 120
    while True:
        told = user.run("queues", "--json")
        if told.returncode == 0 and json.loads(told.stdout)["trained"]:
            return
        assert run.poll() is None, run.stderr.read()
        assert time.monotonic() < deadline, told
        time.sleep(1.0)
