"""A full disk: the cause of a failure comes first, and neither log nor plot nor summary ends a run.

`/dev/full` accepts no byte, like a disk without room.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace

from stream.durable import write_file_atomically
from stream.errors import RunFailedError
from workers.launch import start
from workers.launch.start import RunResult, raise_for_failure
from workers.launch.supervisor import RunOutcome, _empty_status
from workers.role.exit_codes import ExitCode
from workers.role.log_setup import log_to_file
from workers.runs.progress import Progress
from workers.runs.summary import summarize
from workers.settings.toml_file import dump_settings, parse_settings

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")

SUMMARY = summarize(_empty_status(), Progress(), Progress(), 1.0)


def test_drawing_never_ends_a_run(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 1.0}) + "\n")
    (tmp_path / "progress.png").symlink_to("/dev/full")
    start._draw(tmp_path, None)
    (tmp_path / "progress.png").unlink()
    start._draw(tmp_path, None)
    assert (tmp_path / "progress.png").stat().st_size > 0, "it is drawn where it can be"


def test_a_summary_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(start, "write_file_atomically", full)
    start._write_summary(tmp_path, SUMMARY)
    monkeypatch.setattr(start, "write_file_atomically", write_file_atomically)
    start._write_summary(tmp_path, SUMMARY)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 0


def test_a_failure_on_a_full_disk_names_the_disk_first(tmp_path, tiny_disk):
    settings = parse_settings(
        {"run": {"folder": str(tmp_path)}, "model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "a:b"}]}
    )
    failure = RunFailedError("train-0 exited with code 1, and it has never listened: its log is empty")
    result = RunResult(outcome=RunOutcome(status=None, failure=failure, interrupted=False, killed=[]), summary=None)
    with pytest.raises(RunFailedError, match=r"^train-0 exited"):
        raise_for_failure(result, settings)
    settings = replace(settings, run=replace(settings.run, folder=str(tiny_disk)))
    with pytest.raises(
        RunFailedError,
        match=rf"^the disk of {tiny_disk} cannot be written: No space left .* 64 KiB.*room .*first: train-0 exited",
    ):
        raise_for_failure(result, settings)


def test_a_log_without_room_drops_lines_and_goes_on(tmp_path):
    (tmp_path / "full.log").symlink_to("/dev/full")
    with log_to_file("run", tmp_path / "full.log"):
        for _ in range(3):
            structlog.get_logger().info("something.happened", text="x" * 10_000)
    with log_to_file("run", tmp_path / "roomy.log"):
        structlog.get_logger().info("something.happened", text="\udcff")
    (line,) = (tmp_path / "roomy.log").read_text().splitlines()
    assert json.loads(line)["event"] == "something.happened"


def test_a_role_whose_log_is_full_ends_with_the_code_of_its_error(tmp_path):
    table = {
        "run": {"folder": str(tmp_path)},
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rewards": [{"ref": "a:b"}],
    }
    (tmp_path / "run.toml").write_text(dump_settings(parse_settings(table)))
    with Path("/dev/full").open("wb", buffering=0) as full:
        command = [sys.executable, "-P", "-m", "penstock", "feed", str(tmp_path / "run.toml")]
        done = subprocess.run(command, stdout=full, stderr=full, cwd=Path(__file__).parents[2], timeout=60, check=False)
    assert done.returncode == ExitCode.USAGE, "run.redis is empty"


def test_what_user_code_prints_to_a_full_log_is_dropped_and_raises_nothing():
    code = (
        "from workers.role.log_setup import drop_output_when_full as drop; drop(); import sys\n"
        "for _ in range(3): print('x' * 10_000); print('y' * 10_000, file=sys.stderr, flush=True)\n"
        "sys.exit(7)"
    )
    with Path("/dev/full").open("wb", buffering=0) as full:
        command = [sys.executable, "-P", "-c", code]
        root = Path(__file__).parents[2]
        done = subprocess.run(
            command, stdout=full, stderr=full, cwd=root, env={"PYTHONPATH": str(root)}, timeout=60, check=False
        )
    assert done.returncode == 7, "the interpreter exits with 120 if it cannot flush"
