"""Sandboxes of bubblewrap, and a machine without them. Real processes throughout."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import anyio
import psutil
import pytest
from structlog.testing import capture_logs

from envs.builtin.python_sandbox import Python
from envs.call import Ok
from envs.rewards import RewardBatch, RewardFunction
from envs.sandboxes import bubblewrap, python_runner
from envs.sandboxes.bubblewrap import BubblewrapSpec, interpreter_paths, launch, missing_sandbox, sandbox_problem
from envs.sandboxes.pools.forked import run_forked
from envs.sandboxes.pools.isolation import Isolation
from envs.sandboxes.pools.pool import ProcessPool
from stream.validity import Measured
from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)


@pytest.fixture
def fresh():
    """Forget what is known of this machine, before and after."""
    known = (bubblewrap.sandbox_problem, bubblewrap.bubblewrap, bubblewrap.warn_without_sandbox)
    for function in known:
        function.cache_clear()
    yield
    for function in known:
        function.cache_clear()


def on_the_path(monkeypatch, tmp_path, script):
    """Make a program `bwrap` the only one on the PATH."""
    program = tmp_path / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bubblewrap, "becomes_nobody", lambda _: False)  # nobody cannot reach a test's folder


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "not on the PATH"),
        ("echo bubblewrap 0.7.9", "0.7.9 is too old"),
        ("echo nonsense", "bwrap: "),
        (
            '[ "$1" = --version ] && echo bubblewrap 0.8.0 || { echo "bwrap: No permissions" >&2; exit 1; }',
            "No permissions",
        ),
    ],
)
def test_a_machine_that_makes_no_sandboxes_says_why_in_the_log_and_in_check(
    fresh, monkeypatch, tmp_path, script, words
):
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        on_the_path(monkeypatch, tmp_path, script)
    assert words in sandbox_problem()
    monkeypatch.setattr(python_runner, "user_without_sandbox", lambda _: None)
    monkeypatch.setattr(python_runner, "ENGINE_ACCESS", ())
    with capture_logs() as logs:
        Python()
        Python()
    (event,) = [entry for entry in logs if entry["event"] == "sandbox.unavailable"]
    assert words in event["why"]
    assert "use the network" in event["instead"]
    warning = missing_sandbox(Python, {})
    assert words in warning
    assert "use the network" in warning
    assert not missing_sandbox(Python, {"isolation": "process"})
    assert not missing_sandbox(Path, {})


@pytest.mark.usefixtures("needs_sandbox")
def test_an_application_below_usr_is_hidden_and_its_interpreter_is_shown(monkeypatch, tmp_path):
    hidden, shown = tmp_path / "src", tmp_path / "src" / "venv"
    shown.mkdir(parents=True)
    (hidden / "secret").touch()
    (shown / "library").touch()
    monkeypatch.setattr(bubblewrap, "_SYSTEM", (*bubblewrap._SYSTEM, str(tmp_path)))
    code = f"import os; print(os.path.exists({str(hidden / 'secret')!r}), os.path.exists({str(shown / 'library')!r}))"
    spec = BubblewrapSpec(readable=(*interpreter_paths(), str(shown)))
    for masked, expected in (((), "True True"), ((str(hidden),), "False True")):
        monkeypatch.setattr(bubblewrap, "_MASKED", masked)
        with launch([sys.executable, "-I", "-S", "-c", code], spec) as start:
            ended = subprocess.run(start.command, capture_output=True, text=True, check=False, **start.options)
        assert ended.stdout.strip() == expected, ended.stderr


@pytest.mark.usefixtures("needs_sandbox")
def test_a_link_in_a_folder_that_is_shown_is_no_obstacle(tmp_path):
    (tmp_path / "word").write_text("shown")
    (tmp_path / "link").symlink_to("word")
    system = next(path for path in sorted(Path("/usr/bin").iterdir()) if path.is_symlink())
    spec = BubblewrapSpec(readable=(*interpreter_paths(), str(tmp_path), str(tmp_path / "link"), str(system)))
    program = [os.path.realpath(sys.executable), "-I", "-S", "-c", "import sys; print(open(sys.argv[1]).read())"]
    with launch([*program, str(tmp_path / "link")], spec) as started:
        done = subprocess.run(started.command, **started.options, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("shown\n", "")


@pytest.mark.usefixtures("needs_sandbox")
async def test_children_in_sandboxes_run_jobs_and_end_with_their_pool():
    async with ProcessPool.open("tests.cases.looking:handler", {}, 1, isolation=LOOKING) as pool:
        (outcome,) = await pool.map([b"x"], 20)
        assert outcome == Ok(b"1 process, uid 65534")
        (pid,) = pool.pids
    assert not psutil.pid_exists(pid)


LOOKING = Isolation("sandbox", (str(Path(__file__).parents[1]),))


def test_work_in_a_fork_changes_nothing_and_is_killed_alone():
    changed = []

    def work():
        changed.append(1)
        return b"done"

    def hang():
        while True:
            pass

    def wait():
        time.sleep(60)
        return b""

    def fill():
        return bytes(1 << 30)

    def run(work):
        return run_forked(work, cpu_s=1, max_bytes=1 << 28)

    assert run(work).value == b"done"
    assert not changed
    assert run(hang).used_its_time
    assert run(wait).was_kept_waiting  # as on a machine that is too busy
    assert "MemoryError" in run(fill).why
    assert run(lambda: os._exit(3)).why == "it exited"
    assert run(os.abort).why == "it was ended by SIGABRT"
    assert "ZeroDivisionError" in run(lambda: b"%d" % (1 // 0)).why


WORKER = """
import anyio, sys
from envs.sandboxes.pools.isolation import Isolation
from envs.sandboxes.pools.pool import ProcessPool

async def main():
    async with ProcessPool.open("tests.cases.looking:handler", {}, 2, isolation=Isolation("sandbox", (sys.argv[1],))):
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.usefixtures("needs_sandbox")
def test_children_in_sandboxes_end_with_a_worker_that_is_killed():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WORKER, str(root / "tests")]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline() == b"ready\n"
        children = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert len(children) >= 3
    assert not alive


SUBCLASS = """
import os
from envs.builtin.math_verifier import Math

class Mine(Math):
    def __call__(self, completions, **columns):
        return [float(os.path.exists({file!r})) for _ in completions]
"""


@pytest.mark.usefixtures("needs_sandbox")
async def test_a_users_own_class_derived_from_a_sandboxed_reward_has_the_workers_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SUBCLASS.format(file=str(file)))
    load = partial(RewardFunction.load, f"{file}:Mine")
    function = await anyio.to_thread.run_sync(load)
    async with function.open():
        assert await function(RewardBatch(["?"], ["4"], [[1]], columns={"answer": ["4"]}), 60) == [Measured(1.0)]
