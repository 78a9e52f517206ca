"""Ctrl-C ends a run at once whose engine does not answer: what its roles wait for cannot come."""

import json
import signal
import subprocess
import time

import pytest

from tests.cases.ports import free_port
from tests.e2e.harness import Project, stop, wait_for_trained

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("preloaded")]

SHUTDOWN_S = 60
"""What each role may take to finish what it holds."""
ROLLOUT_WAITS = {"role": "rollout", "event": "engine.waiting"}
TRAINER_WAITS = {"role": "train", "event": "engine.waiting", "what": "push"}


def wait_for_event(project: Project, process: subprocess.Popen[str], *wanted: dict[str, str]) -> None:
    """Wait until a role has logged a line with the values of one of these."""
    deadline = time.monotonic() + 60
    while True:
        logs = [path.read_text() for path in (project.run_folder / "logs").glob("*-0.log")]
        lines = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith("{")]
        if any(values.items() <= line.items() for values in wanted for line in lines):
            return
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, project.logs()
        time.sleep(0.05)


def interrupt(project: Project, process: subprocess.Popen[str]) -> dict:
    """Send Ctrl-C. Returns the summary."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, report = process.communicate(timeout=100)
    assert time.monotonic() - began < SHUTDOWN_S / 2, f"{report}\n{project.logs()}"
    assert process.returncode == 0, f"{report}\n{project.logs()}"
    assert f"stopped; `penstock run {project.run_folder}` resumes" in report
    return json.loads(out)


def test_a_run_whose_engine_was_never_there_ends_at_once(project):
    project.table["engine"]["urls"] = [f"http://127.0.0.1:{free_port()}"]
    project.table["queue"]["shutdown_timeout_s"] = SHUTDOWN_S
    process = project.start("run", str(project.write()), "--json")
    try:
        wait_for_event(project, process, ROLLOUT_WAITS)
        wait_for_event(project, process, TRAINER_WAITS)
        summary = interrupt(project, process)
    finally:
        stop(process)
    assert summary["outstanding"] == summary["fed"] == 10


def test_a_run_whose_engine_died_ends_at_once_and_gives_its_prompts_back(project):
    project.prompts(400)
    project.table["filter"] = {"zero_variance": False}
    engine = project.start("serve", project.table["model"]["path"], "--port", "0")
    process = None
    try:
        url = engine.stdout.readline().split()[-1]
        project.table["engine"]["urls"] = [url]
        project.table["queue"]["shutdown_timeout_s"] = SHUTDOWN_S
        process = project.start("run", str(project.write()), "--json")
        wait_for_trained(project, 4, process, 60)
        engine.kill()
        # the one of the two that needed the engine next
        wait_for_event(project, process, {"role": "rollout", "event": "engine.ejected"}, TRAINER_WAITS)
        summary = interrupt(project, process)
    finally:
        if process is not None:
            stop(process)
        engine.kill()
        engine.communicate()
    assert summary["outstanding"] > 0
    assert summary["fed"] == summary["groups_trained"] + summary["outstanding"]
