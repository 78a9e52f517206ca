"""A pool of processes: hard kills lose no job, and misbehaving children do no harm. Real processes throughout."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from envs.call import Failed, Ok, TimedOut
from envs.sandboxes.pools.child_main import ProcessPoolError
from envs.sandboxes.pools.pool import ChildLimits, ProcessPool

HERE = "processes_under_test"
HANDLER = f"{HERE}:handler"
CODE = """
import ctypes, os, signal, sys, threading, time

def handler(**args):
    if args.get("fails"):
        raise ValueError("no licence")
    kept = []
    def run(job):
        word, _, rest = job.decode().partition(" ")
        if word == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: pass
        if word == "native":  # no Python code runs: no alarm, no exception could end it
            ctypes.PyDLL(None).pause()
        if word == "pid": return str(os.getpid()).encode()
        if word == "main": return str(threading.current_thread() is threading.main_thread()).encode()
        if word == "print":
            os.write(1, b"x" * 5_000_000); print("y" * 5_000_000); print("z" * 5_000_000, file=sys.stderr)
        if word == "raise": raise SystemExit(rest)
        if word == "die": os._exit(3)
        if word == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        if word == "keep": kept.append(b"x" * int(rest))
        if word == "fork" and os.fork() == 0: time.sleep(600)
        if word == "once":  # dies the first time
            if not os.path.exists(rest):
                open(rest, "w").close()
                os._exit(1)
        return job
    return run
"""


@pytest.fixture(autouse=True)
def handler(tmp_path, monkeypatch):
    (tmp_path / f"{HERE}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_results_are_in_the_order_of_the_jobs_and_from_main_threads_of_several_processes():
    async with ProcessPool.open(HANDLER, {}, 2) as pool:
        jobs = [f"job {i}".encode() for i in range(200)]
        assert await pool.map(jobs, 30) == [Ok(job) for job in jobs]
        assert await pool.map([b"main"] * 8, 30) == [Ok(b"True")] * 8
        pids = {int(outcome.value) for outcome in await pool.map([b"pid"] * 64, 30)}
    assert os.getpid() not in pids
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("hang", [b"hang", b"native"])
async def test_a_job_past_its_deadline_is_killed_and_nothing_else_is_lost(hang):
    async with ProcessPool.open(HANDLER, {}, 2) as pool:
        await pool.map([b"pid"] * 8, 30)
        jobs = [b"a", b"b", hang, b"c", *(f"{i}".encode() for i in range(60))]
        began = time.monotonic()
        outcomes = await pool.map(jobs, 0.5)
        took = time.monotonic() - began
        assert outcomes[2] == TimedOut(0.5)
        assert [o for i, o in enumerate(outcomes) if i != 2] == [Ok(j) for i, j in enumerate(jobs) if i != 2]
        assert took < 10  # benchmarks/math_verifier.py measures the delay; this only bounds it
        assert await pool.map([b"pid"] * 8, 30)
        assert len(pool.pids) <= 2


@pytest.mark.full
async def test_every_child_hanging_at_once_leaves_a_pool_that_works():
    async with ProcessPool.open(HANDLER, {}, 2) as pool:
        assert await pool.map([b"hang"] * 4, 0.2) == [TimedOut(0.2)] * 4
        assert await pool.map([b"a"], 30) == [Ok(b"a")]


async def test_a_job_that_raises_fails_and_its_child_continues():
    async with ProcessPool.open(HANDLER, {}, 1) as pool:
        before, raised, after = await pool.map([b"pid", b"raise the roof", b"pid"], 30)
        assert isinstance(raised, Failed)
        assert str(raised.error) == "SystemExit: the roof"
        assert before == after


@pytest.mark.parametrize("end", [b"die", pytest.param(b"segfault", marks=pytest.mark.full)])
async def test_only_a_job_that_ends_two_processes_fails(end):
    async with ProcessPool.open(HANDLER, {}, 2) as pool:
        outcomes = await pool.map([b"a", end, b"b"], 30)
        assert isinstance(outcomes[1], Failed)
        assert isinstance(outcomes[1].error, ProcessPoolError)
        assert [outcomes[0], outcomes[2]] == [Ok(b"a"), Ok(b"b")]


async def test_a_job_whose_process_ended_once_runs_in_another(tmp_path):
    async with ProcessPool.open(HANDLER, {}, 1) as pool:
        job = f"once {tmp_path / 'mark'}".encode()
        assert await pool.map([job], 30) == [Ok(job)]
        assert pool.started_count == 2


async def test_children_killed_from_outside_while_idle_cost_nothing():
    async with ProcessPool.open(HANDLER, {}, 2) as pool:
        for _ in range(2):
            await pool.map([b"a"] * 8, 30)
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)
                while is_alive(pid):
                    await anyio.lowlevel.checkpoint()
            assert await pool.map([b"b"] * 8, 30) == [Ok(b"b")] * 8


async def test_output_of_a_job_is_discarded():
    async with ProcessPool.open(HANDLER, {}, 1) as pool:
        assert await pool.map([b"print", b"a"], 30) == [Ok(b"print"), Ok(b"a")]


async def test_a_leaking_child_is_replaced_and_a_job_that_takes_too_much_memory_fails():
    async with ProcessPool.open(HANDLER, {}, 1, ChildLimits(recycle_bytes=120 << 20, max_bytes=400 << 20)) as pool:
        jobs = [b"pid", f"keep {130 << 20}".encode(), b"pid", f"keep {900 << 20}".encode(), b"pid"]
        first, kept, second, refused, third = await pool.map(jobs, 30)
        assert kept == Ok(jobs[1])
        assert second != first
        assert isinstance(refused, Failed)
        assert "MemoryError" in str(refused.error)
        assert third == second


def test_a_stricter_limit_of_the_machine_is_kept():
    program = """
from envs.sandboxes.resource_limits import set_limit
from resource import RLIMIT_DATA, getrlimit, setrlimit
setrlimit(RLIMIT_DATA, (2 << 30, 3 << 30))
set_limit(RLIMIT_DATA, 4 << 30, 4 << 30)
print(*getrlimit(RLIMIT_DATA))
set_limit(RLIMIT_DATA, 1 << 30, 4 << 30)
print(*getrlimit(RLIMIT_DATA))
"""
    path = os.pathsep.join(sys.path)
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert [int(word) >> 30 for word in ended.stdout.split()] == [3, 3, 1, 3]


@pytest.mark.full
async def test_a_child_is_replaced_after_its_maximum_of_jobs():
    async with ProcessPool.open(HANDLER, {}, 1, ChildLimits(max_jobs=3)) as pool:
        pids = [(await pool.map([b"pid"], 30))[0].value for _ in range(7)]
    assert [pids.index(pid) for pid in pids] == [0, 0, 0, 3, 3, 3, 6]


async def test_a_pool_whose_children_cannot_load_their_handler_fails_at_the_start():
    with pytest.raises(ProcessPoolError, match="no licence"):
        async with ProcessPool.open(HANDLER, {"fails": True}, 1):
            raise AssertionError
    with pytest.raises(ProcessPoolError, match="no_such_module"):
        async with ProcessPool.open("no_such_module:handler", {}, 1):
            raise AssertionError


@pytest.mark.full
async def test_jobs_fail_instead_of_waiting_if_no_child_can_start(tmp_path):
    async with ProcessPool.open(HANDLER, {}, 1) as pool:
        (tmp_path / f"{HERE}.py").write_text("raise ImportError('moved away')")
        (outcome,) = await pool.map([b"die"], 30)
        assert isinstance(outcome, Failed)


async def test_a_cancelled_caller_leaves_no_job_behind():
    async with ProcessPool.open(HANDLER, {}, 1) as pool:
        with anyio.move_on_after(0.05):
            await pool.map([b"hang"] * 50, 0.3)
        assert await pool.map([b"a"], 30) == [Ok(b"a")]
        assert pool.started_count <= 3  # one or two hanging jobs ran; the other 48 were removed


async def test_processes_started_by_a_job_are_killed_with_its_child():
    async with ProcessPool.open(HANDLER, {}, 1) as pool:
        await pool.map([b"fork"], 30)
        (pid,) = pool.pids
        members = members_of(pid)
        assert len(members) == 2
    with anyio.fail_after(10):  # a signal takes effect when its process is next scheduled
        while any(map(is_alive, members)):
            await anyio.sleep(0.01)


def members_of(session):
    results = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                results.append(int(stat.parent.name))
    return results


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal")
def test_busy_children_die_with_their_parent(tmp_path):
    program = f"""
import anyio, os, signal, sys
from envs.sandboxes.pools.pool import ProcessPool
async def main():
    async with ProcessPool.open({HANDLER!r}, {{}}, 2) as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.map, [b"hang"] * 2, 60)
            await pool.map([], 1)
            while len(pool.pids) < 2: await anyio.sleep(0.01)
            await anyio.sleep(0.2)
            print(*pool.pids, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
anyio.run(main)
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        check=False,  # the process kills itself
        capture_output=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=30,
    )
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2, ended.stderr.decode()
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        pass
    assert not any(map(is_alive, pids))


def test_frames_are_reassembled_from_any_chunks():
    from envs.sandboxes.pools.child_main import _read, _write

    reading, writing = os.pipe()
    _write(writing, [1, 2])
    os.write(writing, b"\x05\x00")
    assert msgspec.msgpack.decode(_read(reading)) == [1, 2]
    os.close(writing)
    assert _read(reading) is None
    os.close(reading)
