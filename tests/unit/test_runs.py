"""Runs are found, listed and read with one object, from their folders alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from stream.errors import PenstockError, SettingsError
from stream.records import Completion
from stream.trainer.ledger_records import Dropped, Trained
from stream.validity import Measured, RewardReason, Unmeasured
from tests.cases.groups import group
from tests.cases.run_folders import ArchivedRun
from workers.cli import penstock
from workers.runs import run as run_module
from workers.runs.find import open_run
from workers.runs.groups import completion_labels
from workers.runs.live_run import LiveRun, write_live
from workers.runs.logs import RunLogs
from workers.runs.run import Run
from workers.runs.selection import Selection
from workers.terminal.runs import render_line


def make_run(name: str, rewards: dict[str, list[float]] | None = None, folder: Path | None = None) -> Path:
    """Make the folder of a run that was killed, with a group for each name."""
    run = ArchivedRun(folder or Path("runs") / name, name=name)
    for step, (prompt, values) in enumerate((rewards or {}).items(), 1):
        completions = [Completion(index=at, reward=Measured(value), turns=1) for at, value in enumerate(values)]
        outcome = Trained() if len(set(values)) > 1 else Dropped("zero_variance")
        run.end(group(*completions, name=prompt), step, outcome)
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "reward/mean": sum(values) / len(values)}) + "\n")
    return run.path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with three runs."""
    monkeypatch.chdir(tmp_path)
    make_run("killed", {"a": [1.0, 0.0], "b": [0.5, 0.5], "c": [0.25, 0.75]})
    (Path("runs/killed") / "logs").mkdir()
    write_live(make_run("running"), LiveRun.of_this_process("running", "unix:///nowhere.sock"))
    make_run("new")
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(penstock, [*arguments])


def test_runs_are_listed_with_state_step_and_last_reward_running_ones_first(here):
    listed = json.loads(run("runs", "--json").stdout)
    assert [(each["key"], each["state"], each["step"], each["reward"]) for each in listed] == [
        ("running", "running", 0, None),
        ("killed", "killed", 3, 0.5),
        ("new", "not started", 0, None),
    ]
    _, first, second, _ = (line.split() for line in run("runs").stdout.splitlines())
    assert first[:4] == ["running", "running", "-", "-"]
    assert second[:4] == ["killed", "killed", "3", "0.5"]


def test_without_a_run_the_list_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("runs").stdout == "no run below runs/ in this folder\n"
    assert json.loads(run("runs", "--json").stdout) == []


@pytest.mark.parametrize(
    ("conditions", "prompts"),
    [
        ({}, ["c", "b", "a"]),
        ({"reward": "..0.2"}, ["a"]),
        ({"step": "2.."}, ["c", "b"]),
        ({"end": "dropped"}, ["b"]),
        ({"end": ["dropped", "failed"]}, ["b"]),
        ({"end": "trained", "prompt": "c"}, ["c"]),
        ({"invalid": True}, []),
        ({"version": "1.."}, []),
    ],
)
def test_groups_are_found_by_keywords_the_newest_first(here, conditions, prompts):
    groups = open_run("killed").groups(**conditions)
    assert [group.describe()["prompt_id"] for group in groups] == prompts
    assert bool(groups) == bool(prompts)


def test_the_same_words_are_refused_in_python_and_on_the_command_line(here):
    with pytest.raises(SettingsError, match="end zero: write finished"):
        open_run("killed").groups(end="zero")
    assert "end zero: write finished" in run("groups", "killed", "--end", "zero").output
    with pytest.raises(SettingsError, match=r"step 2\.\.1: write a number or a range"):
        open_run("killed").completions(step="2..1")


def test_completions_are_chosen_by_an_order_and_counted(here):
    best = open_run("killed").completions(chosen=Selection("best", 2), step="1..2")
    assert [(view.group.prompt.id, view.reward) for view in best] == [("a", 1.0), ("b", 0.5)]
    assert (len(best), best.offered) == (2, 4)


def test_an_answer_that_could_not_be_judged_is_valid_and_found_by_its_reason():
    labels = completion_labels(None, None, Measured(-1.0, RewardReason.TIMEOUT), "trained")
    assert labels == {"finished", "valid", "trained", "reward:timeout"}
    assert "invalid" in completion_labels(None, None, Unmeasured(RewardReason.TIMEOUT), "trained")


def test_groups_of_steps_are_read_without_a_server(here, monkeypatch):
    write_live(Path("runs/killed"), LiveRun.of_this_process("killed", "unix:///nowhere.sock"))
    monkeypatch.setattr(run_module, "_RECONNECT_S", 0.1)
    opened = open_run("killed")
    assert opened.groups(step="1..").notes == []
    (note,) = opened.groups().notes
    assert note.startswith("unfinished groups could not be read")


def test_a_run_has_its_metrics_and_follows_its_files(here):
    opened = open_run("killed")
    assert [row["reward/mean"] for row in opened.metrics()] == [0.5, 0.5, 0.5]
    assert (opened.name, opened.settings.run.name, opened.url, opened.summary()) == ("killed", "killed", "", None)
    saved = opened.file("run.toml")
    saved.write_text(saved.read_text().replace('name = "killed"', 'name = "killed"\nseed = 7'))
    assert opened.settings.run.seed == 7
    write_live(opened.folder, LiveRun.of_this_process("killed", "unix:///there.sock"))
    assert opened.url == "unix:///there.sock"


def test_a_run_that_is_only_on_a_server_has_no_files():
    with pytest.raises(PenstockError, match="reads its files: give its folder"):
        Run("far", redis="redis://server").groups()


def test_what_blocks_can_be_called_where_an_event_loop_runs_as_in_a_notebook():
    code = (
        "import asyncio\nfrom stream.waiting import run_in_daemon_thread\n"
        "async def answer(): return await asyncio.sleep(0, 7)\n"
        "async def cell(): print(run_in_daemon_thread(answer))\n"
        "print(run_in_daemon_thread(answer)); asyncio.run(cell())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "7\n7\n"


STARTED = {"timestamp": "2026-01-05T10:12:44.5Z", "level": "info", "role": "rollout", "event": "role.started"}
LOST = {
    "timestamp": "2026-01-05T10:12:43Z",
    "level": "warning",
    "event": "lease.lost",
    "prompt": "\x1b[2J",
    "n": [1, 2],
}
FAILED = {"timestamp": "2026-01-05T10:12:45Z", "level": "error", "event": "page.failed", "exception": "Traceback\n  x"}


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "rollout-0.log").write_text(f"{json.dumps(STARTED)}\na library warns\n{json.dumps(FAILED)}\n")
    (folder / "score-0.log").write_text(f"{json.dumps(LOST)}\n")
    return folder


def test_log_lines_of_all_processes_are_in_the_order_of_time_and_readable(logs):
    shown = [render_line(line).plain for line in RunLogs(logs.parent).read_new()]
    assert shown == [
        "2026-01-05 10:12:43 score-0      lease.lost  prompt=\\x1b[2J  n=[1,2]",
        "2026-01-05 10:12:44 rollout-0    role.started",
        "2026-01-05 10:12:44 rollout-0    a library warns",
        "2026-01-05 10:12:45 rollout-0    page.failed\n    Traceback\n      x",
    ]


@pytest.mark.parametrize(("role", "count"), [("rollout", 3), ("rollout-0", 3), ("score", 1), ("", 4)])
def test_the_log_of_a_role_or_of_a_process_is_chosen(logs, role, count):
    assert len(list(RunLogs(logs.parent, role).read_new())) == count


def test_each_line_is_read_once_and_only_when_it_is_complete(logs):
    read = RunLogs(logs.parent, "score")
    assert len(list(read.read_new())) == 1
    assert list(read.read_new()) == []
    with (logs / "score-0.log").open("a") as file:
        file.write('{"event": "role.end')
        file.flush()
        assert list(read.read_new()) == []
        file.write(f'ed"}}\n{json.dumps(STARTED)}\n')
    assert [line.event or line.text for line in read.read_new()] == ['{"event": "role.ended"}', "role.started"]


def test_a_log_that_is_not_there_is_answered_with_those_that_are(here, logs):
    with pytest.raises(PenstockError, match="has no log of 'train'; it has rollout-0, score-0"):
        RunLogs(logs.parent, "train")
    result = run("logs", "killed", "rollout")
    assert result.exit_code == 1
    assert "runs/killed/logs has no log of 'rollout'" in result.output


def test_following_a_run_that_does_not_run_ends_with_its_last_line(here, logs):
    (logs / "score-0.log").rename("runs/killed/logs/score-0.log")
    result = run("logs", "killed", "-f")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("lease.lost") == 1
