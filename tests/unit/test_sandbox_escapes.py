"""What the environment `python` shows of its machine, and what code in it can do to it. Real processes throughout."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from envs.builtin.python_sandbox import Python
from envs.sandboxes import resource_limits
from envs.sandboxes.bubblewrap import becomes_nobody, interpreter_paths
from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("needs_sandbox")


PYTHONS = [python for python in (sys.executable, "/usr/bin/python3") if Path(python).exists()]
NOBODYS = [
    python
    for python in PYTHONS
    if os.geteuid() != 0 or becomes_nobody((*interpreter_paths(python), resource_limits.__file__))
]


async def run(code, **limits):
    env = await anyio.to_thread.run_sync(lambda: Python(**limits))
    return await env.python(code)


async def test_no_process_of_the_machine_can_be_seen_read_or_signalled(monkeypatch):
    monkeypatch.setenv("CANARY", "a secret of the worker")
    code = f"""
import glob, os
seen = [open(f'{{p}}/cmdline').read() for p in glob.glob('/proc/[0-9]*')]
print(sorted('main.py' in line or 'bwrap' in line for line in seen))
print('CANARY' in ''.join(open(p).read() for p in glob.glob('/proc/[0-9]*/environ')))
for act in (lambda: os.kill({os.getpid()}, 9), lambda: open('/proc/{os.getpid()}/mem', 'rb')):
    try: print(act())
    except OSError as error: print(type(error).__name__)
"""
    assert await run(code) == "[True, True]\nFalse\nProcessLookupError\nFileNotFoundError"


KILL = """
    try: os.kill(pid, 9)
    except OSError: pass
"""


async def test_code_that_kills_everything_it_can_ends_no_sibling_and_not_the_worker():
    replies = {}

    async def call(name, code):
        replies[name] = await run(code, timeout_s=30)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, "sibling", "import time; time.sleep(2); print('alive')")
        await anyio.sleep(0.5)
        tasks.start_soon(call, "killer", f"import os\nfor pid in (1, {os.getpid()}, -1):{KILL}\nprint('done')")
    assert replies == {"sibling": "alive", "killer": "done"}


async def test_files_of_the_run_of_the_home_folder_and_of_other_users_do_not_exist(tmp_path, monkeypatch):
    (tmp_path / "canary").write_text("a secret of the run")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    paths = [str(tmp_path / "canary"), "/etc/passwd", "/etc/hostname", "/home", "/var", "/run", "/sys", __file__]
    assert await run(f"import os; print([p for p in {paths!r} if os.path.exists(p)])") == "[]"


async def test_nothing_of_the_machine_can_be_written():
    code = """
import os, sys
folders = ('', '/usr', '/etc', '/dev', '/usr/src', '/usr/local/src', '/root')
for path in (*(f'{folder}/x' for folder in folders), os.__file__, sys.executable, '/proc/sys/kernel/core_pattern'):
    try: open(path, 'a').close(); print(path, 'can be written')
    except OSError: pass
"""
    assert await run(code) == "(no output)"


async def test_memory_outside_of_the_address_space_is_bounded_and_ends_with_the_call():
    code = """
import ctypes, os
block, kernel = bytes(1 << 20), ctypes.CDLL(None, use_errno=True)
def fill(folder):
    written = 0
    try:
        for name in range(64):
            with open(f'{folder}/canary-{name}', 'wb', buffering=0) as file:
                for _ in range(10): written += file.write(block)
    except OSError: pass
    return written >> 20
print(fill('/dev/shm'), fill('/tmp'), fill('.'))
for create in (lambda: os.memfd_create('x'), lambda: kernel.shmget(0, 1 << 30, 0o1600)):
    try: print(create())
    except OSError as error: print(error.strerror)
"""
    in_shm, in_tmp, in_folder, *rest = (await run(code)).split(maxsplit=3)
    assert int(in_shm) <= 16
    assert int(in_tmp) <= 64
    assert int(in_folder) <= 64
    assert rest == ["Operation not permitted\n-1"]
    assert not [path async for path in anyio.Path("/dev/shm").glob("canary-*")]  # it was the call's own


async def test_a_fork_bomb_of_threads_or_processes_starts_nothing():
    code = """
import os, threading
for start in (os.fork, threading.Thread(target=print).start, lambda: os.posix_spawn('/bin/sh', ['sh'], {})):
    try: print(start())
    except (OSError, RuntimeError) as error: print(type(error).__name__)
"""
    assert await run(code) == "BlockingIOError\nRuntimeError\nBlockingIOError"


@pytest.mark.skipif(not NOBODYS, reason="needs files that the user nobody can read, or a user that is not root")
async def test_code_that_may_start_two_processes_can_start_no_third():
    code = """
import os, time
started = 0
try:
    for _ in range(9):
        if os.fork() == 0: time.sleep(5); os._exit(0)
        started += 1
except OSError as error: print(started, type(error).__name__, os.getuid())
"""
    assert await run(code, processes=2, interpreter=NOBODYS[0]) == "2 BlockingIOError 65534"


async def test_there_is_no_network_not_even_that_of_the_machine_itself():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unnamed:
        unnamed.bind("\0penstock-test-canary")
        unnamed.listen()
        code = f"""
import socket
local = (socket.AF_INET, ('127.0.0.1', {server.getsockname()[1]}))
for family, address in (local, (socket.AF_UNIX, '\\0penstock-test-canary')):
    try: socket.socket(family).connect(address); print('connected')
    except OSError as error: print(type(error).__name__)
"""
        assert await run(code) == "ConnectionRefusedError\nConnectionRefusedError"


@pytest.mark.parametrize(
    "call", ["kernel.ptrace(16, 1, 0, 0)", "kernel.unshare(0x10000000)", "kernel.mount(0, 0, 0, 0)"]
)
async def test_calls_that_reach_into_processes_or_namespaces_are_denied(call):
    load = "import ctypes, errno; kernel = ctypes.CDLL(None, use_errno=True)"
    code = f"{load}; print({call}, ctypes.get_errno() == errno.EPERM)"
    assert await run(code) == "-1 True"


WORKER = """
import anyio, sys
from envs.builtin.python_sandbox import Python
code = "import os, time\\nos.fork()\\nprint('begun', flush=True)\\nwhile True: time.sleep(1)"
print("starting", flush=True)
anyio.run(Python(timeout_s=600, processes=100).python, code)
"""


def test_a_worker_that_is_killed_leaves_no_process_behind():
    worker = subprocess.Popen([sys.executable, "-c", WORKER], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE)
    watched = psutil.Process(worker.pid)
    try:
        while len(watched.children(recursive=True)) < 4:  # bwrap, the first process inside, the code and its fork
            assert watched.is_running()
        left = watched.children(recursive=True)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=30)
    gone, alive = psutil.wait_procs(left, timeout=20)
    assert len(gone) == 4
    assert not alive
