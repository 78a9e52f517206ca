"""The environment `python`: the model's code in a sandbox, or with limits alone. Real processes throughout."""

import os
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from envs.builtin.python_sandbox import Python
from envs.factory import EnvironmentFactory
from envs.sandboxes import python_runner
from envs.sandboxes.bubblewrap import NOBODY
from envs.sandboxes.python_runner import engine_access, user_without_sandbox
from envs.snapshot import freeze, thaw
from stream.errors import EnvironmentFailure, ReferenceNotFoundError
from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True, params=["sandbox", "limits alone"])
def machine(request, monkeypatch):
    """Run each test on a machine with sandboxes, and on one without."""
    if request.param == "sandbox":
        request.getfixturevalue("needs_sandbox")
    else:
        if not readable(INTERPRETER):
            pytest.skip("no Python that the user nobody can read")
        monkeypatch.setattr(python_runner, "sandbox_problem", lambda: "bwrap: No permissions")
        monkeypatch.setattr(python_runner, "ENGINE_ACCESS", ())
    return request.param


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Put temporary folders into one of the test's; check that it is empty afterwards."""
    home = Path(tempfile.mkdtemp(prefix="penstock-test-"))
    home.chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    yield home
    assert list(home.iterdir()) == []
    shutil.rmtree(home)


def readable(interpreter):
    with suppress(ReferenceNotFoundError):
        user_without_sandbox(interpreter)
        return Path(interpreter).exists()
    return False


INTERPRETER = next(filter(readable, (sys.executable, "/usr/bin/python3")), sys.executable)
"""One that the user nobody can read, if this is root."""


def make(**limits):
    return Python(**({"interpreter": INTERPRETER} | limits))


async def make_in_thread(**limits):
    return await anyio.to_thread.run_sync(lambda: make(**limits))


async def run(code, **limits):
    env = await make_in_thread(**limits)
    return await env.python(code)


async def test_code_runs_and_its_output_is_returned():
    assert await run("import sys, math\nprint(math.factorial(20))\nprint('é', file=sys.stderr)") == (
        "2432902008176640000\né"
    )
    assert await run("x = 1") == "(no output)"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1/0", ["ZeroDivisionError: division by zero", "main.py", "(exit code 1)"]),
        ("import sys; print('a'); sys.exit(3)", ["a\n(exit code 3)"]),
        ("def", ["SyntaxError"]),
        ("\ud800", ["SyntaxError"]),
        ("import numpy", ["ModuleNotFoundError"]),
        ("import envs", ["ModuleNotFoundError"]),
        ("print(input())", ["EOFError"]),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", ["ended by SIGSEGV"]),
        ("x = bytearray(600 << 20)", ["MemoryError"]),
        ("open('big', 'wb').write(bytes(17 << 20))", ["File too large"]),
        ("import os; print(sorted(os.environ))", ["['HOME', 'LANG', 'PATH']"]),
        ("import os; print(os.listdir('.'))", ["['main.py']"]),
        ("import os; print(sorted(int(f) for f in os.listdir('/proc/self/fd'))[:4])", ["[0, 1, 2, 3]"]),
    ],
)
async def test_the_model_reads_errors_and_exit_codes_of_its_code(code, words):
    result = await run(code)
    for word in words:
        assert word in result


async def test_code_past_its_deadline_is_killed_with_its_processes():
    code = "import os, time\nprint('begun', flush=True)\nos.fork()\nwhile True: time.sleep(1)"
    seen = set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(note_children, seen)
        result = await run(code, timeout_s=1, processes=100_000)
        tasks.cancel_scope.cancel()
    assert result == "begun\nTimeoutError: the code did not end within 1 s"
    assert len(seen) >= 2
    with anyio.fail_after(10):  # a signal takes effect when its process is next scheduled
        while not all(map(is_gone, seen)):
            await anyio.sleep(0.01)


def is_gone(pid):
    """Return whether the process was killed; its new parent may not have reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def note_children(seen):
    """Note each process that runs the model's code, until cancelled."""
    while True:
        for child in await anyio.to_thread.run_sync(lambda: psutil.Process().children(recursive=True)):
            with suppress(psutil.Error):
                if "main.py" in " ".join(await anyio.to_thread.run_sync(child.cmdline)):
                    seen.add(child.pid)
        await anyio.sleep(0.05)


async def test_processor_time_has_its_own_limit():
    assert "ended by SIGXCPU: its processor time was over" in await run("while True: pass", cpu_s=1, timeout_s=30)


async def test_megabytes_of_output_are_cut_in_the_middle():
    result = await run("print('a' * 5_000_000, 'z' * 5_000_000)", output_chars=100)
    assert result == f"{'a' * 50}\n... 10000002 bytes in all ...\n{'z' * 49}"
    assert await run("print('b' * 101)", output_chars=100) == f"{'b' * 50}\n... 102 bytes in all ...\n{'b' * 49}"
    result = await run("while True: print('c' * 100_000)", file_mb=1)
    assert "1048576 bytes in all" in result


async def test_no_state_is_carried_over():
    env = await make_in_thread()
    await env.python("open('kept', 'w').write('x'); import builtins; builtins.kept = 1")
    assert "NameError" in await env.python("print(kept)")
    assert await env.python("import os; print(os.path.exists('kept'))") == "False"


async def test_cancellation_kills_the_code_and_removes_its_files():
    with anyio.move_on_after(0.3) as scope:
        await run("while True: pass")
    assert scope.cancelled_caught  # and the fixture finds no folder


@pytest.mark.parametrize("broken", ["interpreter", "folder", "limits"])
async def test_a_dead_sandbox_is_an_environment_failure(broken, monkeypatch):
    env = await make_in_thread()
    if broken == "interpreter":
        env._runner.interpreter = "/no/such/python"
    elif broken == "folder":
        monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    else:
        env._runner.limits = msgspec.structs.replace(env._runner.limits, memory_mb=1 << 50)
    with pytest.raises(EnvironmentFailure, match="the sandbox"):
        await env.python("print(1)")
    assert env.runs == []


async def test_an_interpreter_that_ends_before_the_code_starts_is_an_environment_failure(folders):
    broken = folders / "python"
    broken.write_text("#!/bin/sh\nexit 0\n")
    broken.chmod(0o755)
    with pytest.raises(EnvironmentFailure, match="its process ended"):
        await run("print(1)", interpreter=str(broken))
    broken.unlink()


@pytest.mark.skipif(
    sys.platform != "linux" or not readable(INTERPRETER),
    reason="limits on processes need Linux, and for root a readable Python",
)
async def test_code_cannot_start_processes_and_root_becomes_nobody():
    output = await run("import os\nprint(os.getuid())\nos.fork()")
    assert "BlockingIOError" in output
    assert output.split()[0] == str(NOBODY if os.geteuid() == 0 else os.geteuid())


async def test_the_models_code_never_runs_as_root_without_a_sandbox(machine, tmp_path, monkeypatch):
    hidden = tmp_path / "python"
    hidden.symlink_to(sys.executable)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    user_without_sandbox.cache_clear()
    try:
        if machine == "sandbox":
            await make_in_thread(interpreter=str(hidden))
        else:
            with pytest.raises(ReferenceNotFoundError, match=r"would run as root.*set `interpreter`"):
                await make_in_thread(interpreter=str(hidden))
    finally:
        user_without_sandbox.cache_clear()


async def test_without_a_sandbox_an_engines_socket_or_a_pods_token_in_reach_is_refused(machine, tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("a secret of the pod")
    monkeypatch.setattr(python_runner, "ENGINE_ACCESS", (str(token),))
    if machine == "sandbox":
        assert await run(f"import os; print(os.path.exists({str(token)!r}), os.path.exists('/run'))") == "False False"
        return
    with pytest.raises(ReferenceNotFoundError, match="this machine or cluster"):
        await make_in_thread()


def test_an_engines_socket_counts_if_the_user_of_the_code_may_write_to_it(tmp_path, monkeypatch):
    token, engine = tmp_path / "token", tmp_path / "engine.sock"
    token.touch(0o600)
    monkeypatch.setattr(python_runner, "ENGINE_ACCESS", (str(token),))
    assert engine_access(NOBODY) == ""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(engine))
        monkeypatch.setenv("DOCKER_HOST", f"unix://{engine}")
        engine.chmod(0o666)
        assert engine_access(NOBODY) == str(engine)
        engine.chmod(0o660)
        assert engine_access(NOBODY) == ""
        assert engine_access(None) == str(engine)


def test_the_environment_has_one_tool_and_its_snapshot_the_programs():
    args = {"timeout_s": 5.0, "interpreter": INTERPRETER}
    factory = EnvironmentFactory.load("envs.builtin.python_sandbox:Python", args)
    assert [tool.name for tool in factory.tools] == ["python"]
    env = factory.make()
    env.reset(task="x")
    anyio.run(env.python, "print(6 * 7)")
    (seen,) = thaw(freeze(env, 10_000), factory).runs
    assert (seen.code, seen.output) == ("print(6 * 7)", "42")
