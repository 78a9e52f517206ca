"""The code blocks of `README.md` work as printed: environment, unit test, settings, a run from Python and its commands.

The commands that operate a run come from `docs/watching.md`, settings of its algorithm from `docs/algorithms.md`.
"""

import json
import re
import shlex
import subprocess
import sys
import time
import tomllib

import pytest

from tests.e2e.harness import Project, balanced, environment, stop
from tests.pages import ROOT, blocks_of
from workers.cli import penstock
from workers.settings.settings import sections
from workers.settings.toml_file import parse_settings

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("preloaded")]

README = (ROOT / "README.md").read_text()
REWARDS = """
import zlib


def by_chance(completions, **columns):
    return [float(zlib.crc32(str(messages).encode()) % 2) for messages in completions]
"""
"""A random model does not earn what the page's environment pays; with this one groups have a variance to train on."""


def blocks(language: str) -> list[str]:
    """Return the page's code blocks in `language`, in order."""
    return [block.text for block in blocks_of(ROOT / "README.md", language)]


def commands() -> list[list[str]]:
    """Return the arguments of each `penstock` command on the page, without the comments behind them."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("penstock ")]


(SETTINGS,) = blocks("toml")
CLASS, UNIT_TEST, FROM_PYTHON = blocks("python")
(OPERATE,) = [block.text for block in blocks_of(ROOT / "docs" / "watching.md", "sh") if "penstock pause" in block.text]
ALGORITHM = blocks_of(ROOT / "docs" / "algorithms.md", "toml")[0].text


@pytest.fixture
def user(tmp_path, random_model):
    """A folder with what the page's minimal settings file names."""
    project = Project(tmp_path, random_model)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my-policy").symlink_to(random_model)
    (tmp_path / "counter.py").write_text(CLASS)
    (tmp_path / "my.toml").write_text(SETTINGS)
    return project


def ask(project: Project, n: int) -> None:
    """Write `n` prompts with the columns that the page uses."""
    rows = [json.dumps({"prompt": f"Use the counter, {i}.", "target": i % 5 + 1}) for i in range(n)]
    (project.folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def test_the_environment_is_checked_and_its_unit_test_passes(user):
    checked = user.run("check", "counter.py:Counter", "--field", "target=3")
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


def test_the_settings_are_valid():
    assert parse_settings(tomllib.loads(SETTINGS))


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
def test_the_lines_of_python_check_a_run_start_it_and_read_it(user):
    """Its prompts are accounted for, and its policy is exported.

    A random model earns nothing in the page's environment: its groups have no variance, and are trained all the same.
    """
    ask(user, 16)
    (user.folder / "my.toml").write_text(f"{SETTINGS}filter.zero_variance = false\nrollout.max_tokens = 64\n")
    ran = subprocess.run(
        [sys.executable, "-c", FROM_PYTHON],
        cwd=user.folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].endswith(" True"), ran.stdout
    summary = json.loads((user.folder / "runs" / "my-run" / "summary.json").read_text())
    assert balanced(summary)
    assert (summary["fed"], summary["outstanding"], summary["completion_states"]) == (16, 0, {"valid": 128})
    exported = user.run("export", "my-run", "my-policy-trained")
    assert exported.returncode == 0, exported.stderr
    assert (user.folder / "my-policy-trained" / "model.safetensors").exists()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_is_operated_as_shown(user):
    """The run trains on the page's environment, with the estimator, loss and correction of the page of algorithms."""
    ask(user, 5000)
    (user.folder / "rewards.py").write_text(REWARDS)
    more = 'run.name = "my-run"\nrewards = [{ ref = "rewards.py:by_chance" }]\n'
    more += "rollout.max_tokens = 64\ntrain.batch_size = 4\n"
    (user.folder / "my.toml").write_text(f"{SETTINGS}{more}{ALGORITHM}")
    shown = [shlex.split(line, comments=True)[1:] for line in OPERATE.splitlines()]
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
