"""User code that never lets the event loop turn costs only the prompts that run into it, and is named."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.e2e.harness import (
    assert_all_trained_once,
    balanced,
    children,
    environment,
    finish,
    running,
    wait_for_trained,
)

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("preloaded")]

HOLDING = """
import re, time

def hold(number):
    if number == 9:
        {code}

class Holding:
    {kind} reset(self, number, **row):
        hold(number)

def holding(completions, number, **columns):
    hold(number[0])
    return [float(len(text) % 2) for text in completions]
"""
POWER, PATTERN, NAP = "9 ** int('9') ** 9", "re.match('(a+)+$', 'a' * 60 + 'b')", "time.sleep(3600)"


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "code", "kind"),
    [
        pytest.param("reward", PATTERN, "def", id="a regular expression in a reward function"),
        pytest.param("environment", POWER, "def", id="a huge power in an environment"),
        pytest.param("environment", NAP, "async def", id="an async method that sleeps"),
    ],
)
def test_code_that_stops_a_role_costs_its_prompt_alone_and_is_named(project, where, code, kind):
    (project.folder / "holding.py").write_text(HOLDING.format(code=code, kind=kind))
    if where == "environment":
        project.table["environments"] = {"holding": f"{project.folder / 'holding.py'}:Holding"}
    else:
        project.table["rewards"] = [{"ref": f"{project.folder / 'holding.py'}:holding"}]
    project.table["filter"] = {"zero_variance": False}
    project.table["queue"] = {"lease_s": 2.0, "hang_timeout_s": 3.0, "max_attempts": 1}
    project.prompts(16)
    ended = project.run("run", str(project.write()), "--no-check")
    summary = json.loads((project.run_folder / "summary.json").read_text())
    assert (summary["fed"], summary["dead"], summary["groups_trained"]) == (16, 1, 15), ended.stderr
    assert balanced(summary)
    (letter,) = json.loads(project.run("dead", "list", str(project.write()), "--json").stdout)
    assert letter["prompt_id"].endswith(":9")
    called = "environment holding" if where == "environment" else "reward function holding"
    method = " (Holding.reset)" if where == "environment" else ""
    named = f"its event loop had not turned for 3 s in {called}, prompt {letter['prompt_id']}{method}"
    assert named in letter["error"]
    line = HOLDING.format(code=code, kind=kind).splitlines().index(f"        {code}") + 1
    assert f"holding.py, line {line})" in letter["error"]
    assert any(letter["prompt_id"] in text and called in text for text in ended.stdout.splitlines()[-4:])
    assert named in ended.stderr, "the terminal names it at the first death"


LONE = """
import sys, time
import anyio
from workers.role.watchdogs import HangGuard

async def main():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(HangGuard(1.0).watch)
        await anyio.sleep(2.5)
        print("turning", flush=True)
        {code}

import re
anyio.run(main)
"""


@pytest.mark.parametrize("code", [PATTERN, NAP], ids=["holds the interpreter", "blocks the event loop"])
def test_a_role_without_a_supervisor_ends_itself_and_prints_where_it_stood(code):
    ended = subprocess.run(
        [sys.executable, "-c", LONE.format(code=code)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "turning\n"), ended.stderr
    assert "Timeout (0:00:01)!" in ended.stderr
    assert re.search(r'File "<string>", line 11 in main', ended.stderr)


@pytest.mark.full
def test_a_suspended_role_is_replaced(project):
    """Its leases expire, and the only scorer of the run would never come back."""
    project.table["queue"] = {"lease_s": 2.0, "hang_timeout_s": 3.0}
    project.table["filter"] = {"zero_variance": False}
    project.prompts(40)
    with running(project) as process:
        wait_for_trained(project, 4, process, 120)
        os.kill(children(process.pid)["score"], signal.SIGSTOP)
        summary = finish(process, project)
    assert_all_trained_once(project, summary, 40)
    lines = (project.run_folder / "logs" / "supervisor.log").read_text().splitlines()
    (hanging,) = [event for event in map(json.loads, lines) if event["event"] == "role.hanging"]
    assert hanging["name"] == "score-0"


PROBED = """
import re, sys
import anyio
from workers.role.context import Readiness
from workers.role.metrics_server import serve_metrics
from workers.settings.toml_file import parse_settings

SETTINGS = parse_settings({
    "run": {"name": "r", "metrics_address": "127.0.0.1:0"},
    "model": {"path": "m"}, "data": {"path": "p.jsonl"}, "rewards": [{"ref": "math"}],
})

async def main():
    async with serve_metrics("score", SETTINGS, Readiness()) as url:
        print(url, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        re.match("(a+)+$", "a" * 60 + "b")

anyio.run(main)
"""


def test_a_liveness_probe_gets_no_answer_while_user_code_holds_the_interpreter():
    command = [sys.executable, "-c", PROBED]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        url = next(line.strip() for line in process.stdout if line.startswith("http"))
        assert urllib.request.urlopen(f"{url}/health", timeout=10).status == 200
        process.stdin.write("go\n")
        process.stdin.flush()
        deadline = time.monotonic() + 30

        def ask_until_it_hangs():
            while time.monotonic() < deadline:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()

        with pytest.raises(TimeoutError):
            ask_until_it_hangs()
    finally:
        process.kill()
        process.communicate()


SLEEPY = """
import time

class Sleepy:
    def __init__(self):
        time.sleep(3600)

    def reset(self, **row):
        pass
"""


@pytest.mark.full
def test_a_constructor_that_sleeps_is_named_after_ten_seconds_before_the_run_and_in_it(project):
    (project.folder / "sleepy.py").write_text(SLEEPY)
    project.table["environments"] = {"sleepy": f"{project.folder / 'sleepy.py'}:Sleepy"}
    process = project.start("run", str(project.write()))
    waits, began = [], time.monotonic()
    try:
        for line in process.stderr:
            if line.startswith("waiting: "):
                waits.append((line, time.monotonic() - began))
            if any("rollout-0" in line or "score-0" in line for line, _ in waits):
                break
    finally:
        process.terminate()
        process.communicate()
    assert [line.partition(" has not")[0] for line, _ in waits] == [
        "waiting: environment sleepy, its module and constructor"
    ] * 2
    assert "(check)" in waits[0][0]
    assert waits[0][1] >= 10
