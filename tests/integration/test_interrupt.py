"""Ctrl-C in the first seconds: one calm line, no traceback, no process left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import psutil
import pytest
from click.testing import CliRunner

from stream.errors import PenstockError
from workers.cli.command_group import CommandGroup
from workers.role.exit_codes import ExitCode
from workers.settings.toml_file import dump_settings, parse_settings

ROOT = Path(__file__).parents[2]


def penstock(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start the command in a terminal's way: Ctrl-C reaches its whole process group."""
    return subprocess.Popen(
        # Tests that run in the background of a shell ignore SIGINT, and so would the processes they start.
        ["env", "--default-signal=INT", sys.executable, "-P", "-m", "penstock", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_with(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PENSTOCK_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_while_modules_are_imported(tmp_path):
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    process = penstock("run", "any.toml", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert process.communicate(timeout=30)[0] == "interrupted\n"
    assert process.returncode == ExitCode.INTERRUPTED


@pytest.mark.parametrize("redis", ["absent", "private"])
def test_before_a_role_was_started(tmp_path, redis):
    """The server does not answer, or the private one is starting: nothing has to be drained."""
    run = {"name": "early", "folder": str(tmp_path / "run")}
    run |= {"redis": f"unix://{tmp_path}/nothing.sock"} if redis == "absent" else {}
    table = {"run": run, "model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"ref": "a:b"}]}
    (tmp_path / "file.toml").write_text(dump_settings(parse_settings(table)))
    process = penstock("run", str(tmp_path / "file.toml"), "--quiet", "--no-check", PENSTOCK_TEST_MARK=str(tmp_path))
    awaited = "redis.waiting" if redis == "absent" else "private_server.started"
    log, deadline = tmp_path / "run" / "logs" / "supervisor.log", time.monotonic() + 30
    while not (log.exists() and awaited in log.read_text()):
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.01)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    folder = tmp_path / "run"
    assert output == f"new run early in {folder}\nstopped; `penstock run {folder}` resumes\n"
    assert process.returncode == ExitCode.SUCCESS
    assert redis == "private" or time.monotonic() - began < 10, "it waited for the server"
    assert processes_with(str(tmp_path)) == []


def test_while_everything_is_checked(tmp_path):
    """A reward function's import hangs: its process ends with the command, and no run was begun."""
    (tmp_path / "rewards.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'reached')!r}).touch()\ntime.sleep(60)\n"
    )
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n')
    data, rewards = {"path": f"{tmp_path}/d.jsonl"}, [{"ref": f"{tmp_path}/rewards.py:b"}]
    table = {"run": {"folder": str(tmp_path / "run")}, "model": {"path": "m"}, "data": data, "rewards": rewards}
    (tmp_path / "file.toml").write_text(dump_settings(parse_settings(table)))
    process = penstock("run", str(tmp_path / "file.toml"), PENSTOCK_TEST_MARK=str(tmp_path))
    deadline = time.monotonic() + 30
    while not (tmp_path / "reached").exists():
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "interrupted\n"
    assert process.returncode == ExitCode.INTERRUPTED
    assert not (tmp_path / "run").exists()
    assert processes_with(str(tmp_path)) == []


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        BaseExceptionGroup("", [PenstockError("because of it"), KeyboardInterrupt()]),
        BaseExceptionGroup("", [BaseExceptionGroup("", [KeyboardInterrupt(), ValueError("because of it")])]),
    ],
    ids=["alone", "with an error that it caused", "in nested tasks"],
)
def test_in_a_command(error):
    @click.group(cls=CommandGroup)
    def group() -> None:
        pass

    @group.command()
    def work() -> None:
        raise error

    result = CliRunner().invoke(group, ["work"])
    assert (result.output, result.exit_code) == ("interrupted\n", ExitCode.INTERRUPTED)
