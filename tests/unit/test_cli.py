"""The command line reports errors clearly."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from workers.cli import penstock
from workers.cli.errors import as_command_error
from workers.cli.start import _demo_folder
from workers.demo.base_models import write_base_model
from workers.role.exit_codes import ExitCode

pytestmark = pytest.mark.usefixtures("preloaded")


def run_python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_help_names_every_command():
    output = CliRunner().invoke(penstock, ["--help"]).output
    assert all(f"\n  {name} " in output for name in penstock.commands)


@pytest.mark.parametrize("command", [*penstock.commands, *(f"dead {v}" for v in ("list", "show", "retry", "drop"))])
def test_every_command_has_help(command):
    result = CliRunner().invoke(penstock, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.output


def test_a_wrong_setting_is_one_clear_line_and_exit_code_2(tmp_path):
    (tmp_path / "run.toml").write_text("[rollout]\ngroup_sise = 4\n")
    result = run_python("-m", "penstock", "run", "run.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: run.toml: ")
    assert list(tmp_path.iterdir()) == [tmp_path / "run.toml"]


def test_a_setting_on_the_command_line_is_checked_too(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[data]\npath = "d"\n[environments]\ncalculator = "calculator"\n'
    )
    result = run_python("-m", "penstock", "run", "run.toml", "--set", "train.batch_size=0", cwd=tmp_path)
    assert result.returncode == 2
    assert "train.batch_size" in result.stderr


def test_other_expected_errors_are_one_clear_line_and_exit_code_1(tmp_path):
    result = run_python("-m", "penstock", "queues", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == "error: no run is active under runs/; name a run's folder, or its settings file\n"


def test_a_missing_file_is_a_usage_error(tmp_path):
    result = run_python("-m", "penstock", "train", "nowhere.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert "nowhere.toml" in result.stderr


def test_dead_letters_need_ids_or_all(tmp_path):
    result = CliRunner().invoke(penstock, ["dead", "drop"])
    assert result.exit_code == 2
    assert "--id" in result.stderr
    result = CliRunner().invoke(penstock, ["dead", "drop", "--all", "--id", "1-0"])
    assert result.exit_code == 2


def test_demos_that_are_different_runs_have_different_folders():
    folders = [
        _demo_folder(seed, steps, control, engine)
        for seed in (1, 2)
        for steps in (None, 10)
        for control in (None, "zero-lr", "permuted")
        for engine in (None, "vllm")
    ]
    assert folders[0] == Path("runs/demo")
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("command", ["queues", "run", "show", "export", "dead list"])
def test_a_name_that_no_file_can_have_is_one_clear_line(command):
    other = ["out"] if command == "export" else []
    result = CliRunner().invoke(penstock, [*command.split(), "n" * 300, *other])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert "File name too long; " in result.stderr


@pytest.mark.parametrize("folder", ["a-file", "a-file/run", "/proc/run", "n" * 300])
def test_a_folder_that_cannot_be_is_one_clear_line(folder, tmp_path):
    model = '[model]\npath = "m"\n[environments]\ncalculator = "calculator"\n'
    (tmp_path / "my.toml").write_text(f'{model}[run]\nname = "x"\nfolder = "{folder}"\n')
    (tmp_path / "a-file").touch()
    result = run_python("-m", "penstock", "run", "my.toml", "--no-check", cwd=tmp_path)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "cannot be the run's folder" in result.stderr


def test_output_to_a_full_disk_is_one_clear_line(tmp_path):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "penstock", "algorithms"]
        result = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == "error: a file: No space left on device; make room on its disk\n"


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "make room"), (errno.EROFS, "mount"), (errno.EACCES, "permission")]
)
def test_an_error_of_a_disk_names_the_file_and_the_remedy(number, remedy):
    found = as_command_error(ExceptionGroup("", [OSError(number, os.strerror(number), "runs/a/ledger.jsonl")]))
    assert found.message.startswith(f"runs/a/ledger.jsonl: {os.strerror(number)}; ")
    assert remedy in found.message


def test_an_error_of_the_code_is_not_hidden():
    assert as_command_error(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None


def test_a_command_that_has_loaded_nothing_yet_names_the_folder_that_cannot_be(tmp_path):
    (tmp_path / "a-file").touch()
    result = run_python("-m", "penstock", "base-model", "a-file/model", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == "error: a-file/model: Not a directory; a folder belongs there; move the file away\n"


def test_a_port_above_the_last_one_is_a_usage_error(tmp_path):
    result = CliRunner().invoke(penstock, ["serve", str(tmp_path), "--port", "99999"])
    assert result.exit_code == 2
    assert "99999 is not in the range" in result.stderr


@pytest.mark.parametrize("command", ["serve", "dashboard"])
def test_a_server_on_a_port_in_use_says_so_in_one_line_and_blames_nobody(command, tmp_path):
    write_base_model("calculator", tmp_path / "model")
    target = ["model"] if command == "serve" else []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_python("-m", "penstock", command, *target, "--port", str(port), cwd=tmp_path)
    assert result.returncode == ExitCode.FAILURE
    problem = f"error: cannot listen on 127.0.0.1:{port}: address already in use; choose another port"
    assert result.stderr.splitlines()[-1] == problem
    assert "Traceback" not in result.stderr
    assert "user code" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["bad.toml"], "not TOML"),
        (["good.toml", "--redis", "redis://127.0.0.1:1"], "did not answer for 0.1 s"),
        (["http://127.0.0.1:1/run.toml"], "could not be downloaded"),
    ],
)
def test_a_role_that_cannot_start_says_why_without_a_traceback(arguments, problem, tmp_path):
    (tmp_path / "bad.toml").write_text("[run\n")
    (tmp_path / "good.toml").write_text(
        '[run]\nname = "x"\n[model]\npath = "m"\n[environments]\ncalculator = "calculator"\n'
        "[queue]\nreconnect_timeout_s = 0.1\n"
    )
    result = run_python("-m", "penstock", "feed", *arguments, cwd=tmp_path)
    assert problem in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert "user code" not in result.stderr
