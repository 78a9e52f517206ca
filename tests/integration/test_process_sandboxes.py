"""The provider `process`: conformance, what attacks from inside can do, and what is left of a worker that is killed."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from envs.contract import ToolError
from envs.sandboxes import bubblewrap, process
from envs.sandboxes.conformance import run_case
from envs.sandboxes.conformance_bench import CaseSkipped
from envs.sandboxes.conformance_cases import CASES
from envs.sandboxes.contract import (
    FailureKind,
    Network,
    ProviderOptions,
    SandboxEndedError,
    SandboxFailure,
    SandboxSpec,
)
from envs.sandboxes.process import ProcessProvider
from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("needs_sandbox")

SPEC = SandboxSpec(memory_mb=256, disk_mb=64, pids=32, max_life_s=300)


@pytest.fixture
async def provider(tmp_path):
    async with ProcessProvider(ProviderOptions(address=str(tmp_path / "noted"))) as made:
        yield made


@pytest.fixture
async def sandbox(provider):
    return await provider.create("penstock-attacked", SPEC, {})


async def sh(sandbox, script, timeout_s=20, **options):
    return await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s, **options)


async def python(sandbox, code, timeout_s=20):
    return await sandbox.exec(["python3", "-I", "-S", "-c", code], timeout_s=timeout_s)


@pytest.mark.parametrize("case", CASES)
async def test_the_contract_is_met(case, tmp_path):
    run = run_case("process", case, ProviderOptions(address=str(tmp_path / "noted")))
    if case == "fence":
        with pytest.raises(CaseSkipped, match="end with their worker"):
            await run
    else:
        await run


async def test_process_1_cannot_be_read_or_written_by_what_it_starts(sandbox):
    code = """
import os
for name in ("mem", "environ", "maps", "fd", "cwd"):
    try:
        path = f"/proc/1/{name}"
        act = {"fd": os.listdir, "cwd": os.readlink}.get(name, lambda path: open(path, "rb").read(1))
        print(name, act(path))
    except OSError as error: print(name, type(error).__name__)
for number in (9, 15, 2, 19):
    os.kill(1, number)
print(os.getuid(), os.getpid() > 1)
"""
    result = await python(sandbox, code)
    lines = result.stdout.decode().splitlines()
    assert lines == [f"{name} PermissionError" for name in ("mem", "environ", "maps", "fd", "cwd")] + ["65534 True"]
    assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"


async def test_a_fork_bomb_ends_at_its_deadline_and_the_next_command_runs(sandbox):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert (await python(sandbox, bomb, timeout_s=1.5)).ended == "timeout"
    left = await sh(sandbox, "ls -d /proc/[0-9]* | wc -l")
    assert int(left.stdout) <= 5  # process 1, and those of this command


async def test_a_fork_bomb_in_the_background_leaves_room_for_a_command(sandbox):
    bomb = "if os.fork() == 0:\n    os.setsid()\n    while True:\n        try: os.fork()\n        except OSError: pass"
    await python(sandbox, f"import os\n{bomb}")
    await anyio.sleep(1)
    assert (await sandbox.exec(["echo", "alive"], timeout_s=20)).stdout == b"alive\n"
    assert (await sandbox.exec(["sh", "-c", "kill -9 -1"], timeout_s=20)).code in (0, 137)


async def test_a_daemon_that_left_its_session_and_ignores_signals_ends_with_the_sandbox(provider, sandbox):
    code = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 32):
            if number not in (9, 19): signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    os._exit(0)
"""
    await python(sandbox, code)
    living = psutil.Process(provider._living[sandbox.name].process.pid).children(recursive=True)
    assert len(living) == 2  # process 1 and the daemon
    assert await provider.remove(sandbox.name)
    assert not [one for one in living if one.is_running()]


async def test_memory_of_many_processes_together_is_bounded(sandbox):
    code = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = b"x" * (100 << 20)
        time.sleep(8)
        os._exit(0)
killed = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(6)]
print(sorted(killed))
"""
    result = await python(sandbox, code, timeout_s=30)
    assert b"-9" in result.stdout or result.code == 137
    assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"


async def test_full_folders_and_shared_memory_are_bounded_and_the_sandbox_goes_on(sandbox):
    code = """
import os
block = bytes(1 << 20)
for folder in ("/sandbox", "/tmp", "/dev/shm"):
    written = 0
    try:
        with open(f"{folder}/large", "wb", buffering=0) as file:
            while True: written += file.write(block)
    except OSError: print(written >> 20)
try: os.memfd_create("x")
except OSError as error: print(error.strerror)
"""
    *sizes, denied = (await python(sandbox, code)).stdout.decode().splitlines()
    assert [int(size) for size in sizes] == [32, 32, 64]
    assert denied == "Operation not permitted"
    with pytest.raises(ToolError, match="No space left"):
        await sandbox.write({"/sandbox/more": b"x" * 100_000})
    assert (await sh(sandbox, "rm /tmp/large /sandbox/large; echo alive")).stdout == b"alive\n"


async def test_a_flood_of_empty_files_ends_its_processes(provider, monkeypatch):
    monkeypatch.setattr(process, "_MAX_FILES", 5_000)
    sandbox = await provider.create("penstock-flooded", SPEC, {})
    code = "import itertools\nfor number in itertools.count(): open(f'/tmp/{number}', 'w').close()"
    result = await python(sandbox, code, timeout_s=30)
    assert (result.code, result.ended) == (137, "exited")
    assert (await sh(sandbox, "rm -r /tmp/*; echo alive")).stdout == b"alive\n"


async def test_files_that_attack_who_reads_them_do_no_harm(sandbox):
    code = r"""
import os
os.makedirs("/tmp/closed/in"); open("/tmp/closed/in/file", "w").write("kept"); os.chmod("/tmp/closed", 0)
open("/tmp/sparse", "wb").truncate(1 << 40)
os.mkfifo("/tmp/pipe"); os.symlink("/proc/1/mem", "/tmp/link"); open(b"/tmp/\xff\xfe", "w").close()
os.chdir("/tmp")
for _ in range(3000):
    os.mkdir("d"); os.chdir("d")
"""
    assert (await python(sandbox, code)).code == 0
    paths = {one.path for one in await sandbox.changed_files()}
    assert {"/tmp/closed/in/file", "/tmp/sparse", "/tmp/pipe", "/tmp/link", "/tmp/\ufffd\ufffd"} <= paths
    archive = sandbox.snapshots[await sandbox.snapshot()]
    assert archive.seek(0, os.SEEK_END) < 100 << 20


async def test_a_call_that_is_cancelled_is_killed_and_one_with_an_id_is_not(sandbox):
    with anyio.move_on_after(0.5):
        await sh(sandbox, "sleep 1; echo late >/tmp/anonymous")
    with anyio.move_on_after(0.5):
        await sh(sandbox, "sleep 1; echo late >/tmp/named; echo done", id="call")
    assert (await sh(sandbox, "never", id="call")).stdout == b"done\n"
    assert await sandbox.read("/tmp/named", 10) == b"late\n"
    with pytest.raises(FileNotFoundError):
        await sandbox.read("/tmp/anonymous", 10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"network": Network.OPEN}, "network = open"),
        ({"gpus": 1}, "gpus = 1"),
        ({"user": "root"}, "user = root"),
        ({"workdir": "/app"}, "workdir = /app"),
        ({"image": "debian:12"}, "no images"),
    ],
)
async def test_what_it_lacks_is_refused_with_a_remedy(provider, change, words):
    with pytest.raises(SandboxFailure, match=words) as raised:
        await provider.create("penstock-refused", SandboxSpec(**change), {})
    assert "`docker`" in str(raised.value)


async def test_a_machine_without_bubblewrap_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "sandbox_problem", lambda: "bubblewrap (bwrap) is not on the PATH")
    with pytest.raises(SandboxFailure, match=r"not on the PATH.*Install bubblewrap") as raised:
        await ProcessProvider(ProviderOptions(address=str(tmp_path))).__aenter__()
    assert raised.value.kind == FailureKind.CREATE


async def test_root_whose_python_nobody_can_read_makes_no_sandboxes(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "becomes_nobody", lambda _: False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SandboxFailure, match="run the worker as another user"):
        await ProcessProvider(ProviderOptions(address=str(tmp_path))).__aenter__()


WORKER = """
import sys, anyio
from envs.sandboxes.contract import ProviderOptions, SandboxSpec
from envs.sandboxes.process import ProcessProvider

ESCAPE = '''
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 32):
            if number not in (9, 19): signal.signal(number, signal.SIG_IGN)
        while True: time.sleep(1)
    os._exit(0)
open("/tmp/file", "w").write("x" * 100000)
'''

async def live(provider, name):
    while True:
        labels = {"penstock.run": "killed", "penstock.begun": "1"}
        sandbox = await provider.create(name, SandboxSpec(memory_mb=256), labels)
        print(name, flush=True)
        await sandbox.exec(["python3", "-c", ESCAPE], timeout_s=20)
        await sandbox.snapshot()
        with anyio.move_on_after(0.2):
            await sandbox.exec(["sh", "-c", "trap '' TERM; sleep 600"], timeout_s=600)
        await provider.remove(name)

async def main():
    async with ProcessProvider(ProviderOptions(address=sys.argv[1])) as provider:
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(live, provider, f"penstock-{number}")

anyio.run(main, backend_options={"use_uvloop": sys.argv[2] == "uvloop"})
"""


def kill_worker_after(delay_s, folder, loop):
    """Start a worker that makes, uses and removes sandboxes, kill it, and return its processes from before the kill."""
    command = [sys.executable, "-c", WORKER, str(folder), loop]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE) as worker:
        worker.stdout.readline()
        time.sleep(delay_s)
        left = psutil.Process(worker.pid).children(recursive=True)
        worker.send_signal(signal.SIGKILL)
        worker.wait(30)
    return left


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=[pytest.mark.full, pytest.mark.timeout(300)])])
async def test_workers_that_are_killed_leave_no_process_and_no_file(kills, tmp_path):
    choose, slowest = random.Random(11), 0.0
    for number in range(kills):
        loop = "uvloop" if number % 2 else "asyncio"
        left = await anyio.to_thread.run_sync(kill_worker_after, choose.uniform(0, 1.2), tmp_path, loop)
        killed = time.monotonic()
        _, alive = await anyio.to_thread.run_sync(lambda left=left: psutil.wait_procs(left, timeout=20))
        slowest = max(slowest, time.monotonic() - killed)
        assert not alive
    print(f"{kills} kills, the last process ended after at most {slowest:.2f} s")
    async with ProcessProvider(ProviderOptions(address=str(tmp_path))) as provider:
        assert await provider.list("killed") == []
    assert list(tmp_path.iterdir()) == []


async def test_another_worker_sees_a_sandbox_and_can_remove_it(provider, tmp_path):
    made = await provider.create("penstock-seen", SPEC, {"penstock.run": "run-1", "penstock.begun": "7"})
    async with ProcessProvider(ProviderOptions(address=str(tmp_path / "noted"))) as other:
        (listed,) = await other.list("run-1")
        assert (listed.name, listed.begun) == ("penstock-seen", 7.0)
        assert await other.remove("penstock-seen") is True
        assert await other.list() == []
    with pytest.raises(SandboxFailure, match="is gone") as raised:
        await sh(made, "true")
    assert raised.value.kind == FailureKind.LOST
    assert await provider.remove("penstock-seen") is False


async def test_a_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(SandboxFailure, match="this user alone"):
        await ProcessProvider(ProviderOptions(address=str(folder))).__aenter__()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
async def test_sandboxes_of_root_run_as_nobody_also_outside(provider, sandbox):
    (first,) = psutil.Process(provider._living[sandbox.name].process.pid).children()
    assert first.uids().real == bubblewrap.NOBODY


async def test_a_sandbox_at_the_end_of_its_life_ended_by_itself_and_one_that_was_killed_is_lost(provider, sandbox):
    short = await provider.create("penstock-short", msgspec.structs.replace(SPEC, max_life_s=4.0), {})
    with pytest.raises(SandboxEndedError, match="had lived for 4 s"):
        await sh(short, "sleep 9")
    with pytest.raises(SandboxEndedError, match="had lived for 4 s"):
        await short.read("/tmp/file", 10)
    with pytest.raises(SandboxFailure, match="killed from outside") as raised:
        await kill_during(provider, sandbox, "sleep 5")
    assert raised.value.kind == FailureKind.LOST


async def kill_during(provider, sandbox, script):
    entry = await anyio.to_thread.run_sync(provider._registry.find, sandbox.name)
    timer = threading.Timer(0.5, os.kill, (entry.pid, signal.SIGKILL))
    timer.start()
    try:
        await sh(sandbox, script)
    finally:
        await anyio.to_thread.run_sync(timer.join)
