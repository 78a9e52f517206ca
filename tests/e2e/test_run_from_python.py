"""`penstock.run`, `play` and `check` called by a user's Python: as a script, or in a cell of a notebook."""

import json
import signal
import subprocess
import sys

import pytest

import penstock
from stream.errors import RunFailedError
from tests.e2e.harness import balanced, environment, wait_for_trained
from tests.e2e.test_run_endings import LATE
from workers.demo.base_models import write_base_model

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("preloaded")]

CURSOR = "\x1b"
RUN = """
import json, signal, sys, msgspec, penstock

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may have been started with it ignored
print(json.dumps(msgspec.to_builtins(penstock.run(sys.argv[1]))), file=sys.stderr)
"""
NOTEBOOK = """
import asyncio, json, sys, msgspec, penstock

async def cells():
    report = penstock.check("guess")
    group = penstock.play("guess", policy="model", n=2, overrides={"rollout.max_turns": 2})
    summary = penstock.run(sys.argv[1], {"train.max_steps": 1}, quiet=True)
    run = penstock.open_run(sys.argv[1])
    return {
        "ok": report.ok,
        "rewards": [msgspec.to_builtins(completion.reward) for completion in group.completions],
        "finished": summary.finished,
        "trained": run.status().trained,
        "clean": run.audit().clean,
        "groups": len(run.groups()),
    }

print(json.dumps(asyncio.run(cells())))
"""


def script(project, code):
    """Return the command of a script of the user's, which starts or opens the project's run."""
    file = project.folder / "script.py"
    file.write_text(code)
    return [sys.executable, str(file), str(project.write())]


def test_a_run_returns_its_final_numbers_and_prints_plain_lines(project, capfd):
    overrides = {"train.max_steps": 1, "model.path": project.folder / "other", "model": project.table["model"]}
    summary = penstock.run(project.write(), overrides)
    assert isinstance(summary, penstock.RunSummary)
    assert (summary.finished, summary.steps, summary.failure) == (True, 1, None)
    assert summary.is_balanced
    printed = capfd.readouterr().out
    assert CURSOR not in printed
    assert f"new run test in {project.run_folder}" in printed
    assert "trained" in printed
    run = penstock.open_run(project.run_folder)
    assert [row["step"] for row in run.metrics()] == [1]
    assert run.summary() == summary

    again = penstock.run(project.run_folder, quiet=True)  # it has finished: nothing is started
    assert again == summary
    assert capfd.readouterr() == ("", "")


def test_a_wrong_key_is_named(project):
    with pytest.raises(penstock.SettingsError, match=r"unknown key train\.batch_sise; allowed there: .*batch_size"):
        penstock.run(project.write(), {"train.batch_sise": 3})
    assert not project.run_folder.exists()


def test_what_the_check_finds_is_in_the_error(project, capfd):
    with pytest.raises(penstock.SettingsError, match=r"nothing\.py") as raised:
        penstock.run(project.write(), {"rewards": [{"ref": "nothing.py:exact"}]}, quiet=True)
    assert "The run cannot start: 1 error" in str(raised.value)
    assert not project.run_folder.exists()
    assert capfd.readouterr().out == ""


def test_a_failed_run_raises_with_the_place_in_the_users_code(project):
    (project.folder / "rewards.py").write_text(LATE)
    project.prompts(40)
    settings = {"rewards": [{"ref": f"{project.folder}/rewards.py:exact"}]}
    with pytest.raises(RunFailedError, match="reward:raised") as raised:
        penstock.run(project.write(), settings, quiet=True)
    assert raised.value.cause is not None
    assert raised.value.cause.file == f"{project.folder}/rewards.py"
    summary = penstock.open_run(project.run_folder).summary()
    assert summary is not None
    assert summary.failure is not None


def test_an_interrupt_drains_the_run_and_a_second_call_resumes_it(project):
    project.prompts(5000)  # more than are trained before the interrupt
    command = script(project, RUN)
    process = subprocess.Popen(
        command, cwd=project.folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_trained(project, 4, process, within_s=90)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, f"{out}\n{err}"
    stopped = json.loads(err)
    assert (stopped["finished"], balanced(stopped)) == (False, True)
    assert 4 <= stopped["groups_trained"] < 5000
    assert f"stopped; `penstock run {project.run_folder}` resumes" in out

    steps = stopped["steps"] + 1
    resumed = penstock.run(project.run_folder, {"train.max_steps": steps}, quiet=True)
    assert (resumed.finished, resumed.steps) == (True, steps)
    ends = [line["prompt"] for line in project.ledger() if "prompt" in line]
    assert len(ends) == len(set(ends))
    assert resumed.groups_trained > stopped["groups_trained"]


def test_all_of_it_works_where_an_event_loop_runs_as_in_a_notebook(project):
    write_base_model("tool-caller", project.folder / "model")
    command = script(project, NOTEBOOK)
    done = subprocess.run(
        command, cwd=project.folder, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # the cells' own line is the only one: they were quiet
    assert [reward["type"] for reward in found.pop("rewards")] == ["measured"] * 2
    assert found.pop("groups") >= 4  # those that were dropped are among them
    assert found == {"ok": True, "finished": True, "trained": 4, "clean": True}
    assert done.stderr == ""
