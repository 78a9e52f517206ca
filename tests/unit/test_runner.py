"""The runner of sandboxes (`envs/sandboxes/runner.sh`), on this machine's own shells, without a sandbox."""

import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress

import psutil
import pytest

from envs.sandboxes.runner import RUNNER, FencedError, parse_reply

SHELLS = {"sh": ["sh"], "busybox": ["busybox", "sh"], "bash": ["bash"]}
DEADLINE_S = 20


class Runner:
    """A runner's folder, and calls of it as an engine makes them."""

    def __init__(self, folder, shell):
        self.file = folder / "runner"
        self.file.write_text(RUNNER)
        self.shell = shell
        self.numbers = itertools.count()

    def start(self, command, *, call="", fence=0, timeout=DEADLINE_S, max_bytes=10_000, folder="/"):
        words = ["run", call or f"call-{next(self.numbers)}", fence, timeout, max_bytes, folder, *command]
        return subprocess.Popen(
            [*self.shell, self.file, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, *command, **options):
        process = self.start(command, **options)
        return parse_reply(*process.communicate(timeout=DEADLINE_S))

    def sh(self, script, **options):
        return self.run("sh", "-c", script, **options)

    def fence(self, fence):
        return subprocess.run([*self.shell, self.file, "fence", str(fence)], capture_output=True, check=True)


@pytest.fixture(params=SHELLS)
def runner(request, tmp_path):
    shell = SHELLS[request.param]
    if shutil.which(shell[0]) is None or shutil.which("setsid") is None:
        pytest.skip(f"no {shell[0]} or no setsid")
    return Runner(tmp_path, shell)


def wait_for(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_both_outputs_and_the_code_are_returned(runner):
    result = runner.sh("echo out; echo err >&2; exit 7")
    assert (result.code, result.ended) == (7, "exited")
    assert (result.stdout, result.stderr, result.truncated) == (b"out\n", b"err\n", False)


def test_arguments_are_read_by_no_shell(runner):
    assert runner.run("printf", "[%s]", "a b", "$HOME", "it's", "", "*").stdout == b"[a b][$HOME][it's][][*]"


def test_a_command_that_does_not_exist_is_127_and_a_folder_126(runner):
    assert runner.run("/no/such/program").code == 127
    assert runner.run("true", folder="/no/such/folder").code == 126


def test_a_repeated_id_runs_nothing_and_has_the_first_result(runner, tmp_path):
    script = f"echo effect >>{tmp_path}/effects; echo done; exit 3"
    first, second = (runner.sh(script, call="once") for _ in range(2))
    assert first == second
    assert (tmp_path / "effects").read_text() == "effect\n"


def test_a_call_repeated_while_the_first_runs_waits_for_its_result(runner, tmp_path):
    first = runner.start(["sh", "-c", f"echo effect >>{tmp_path}/effects; sleep 1; echo done"], call="once")
    wait_for((tmp_path / "effects").exists, "the first call has not begun")
    assert runner.sh("echo twice", call="once").stdout == b"done\n"
    assert parse_reply(*first.communicate(timeout=DEADLINE_S)).stdout == b"done\n"


def test_a_caller_that_dies_loses_no_result(runner, tmp_path):
    first = runner.start(["sh", "-c", f"touch {tmp_path}/begun; sleep 1; echo done"], call="once")
    wait_for((tmp_path / "begun").exists, "the call has not begun")
    for pipe in (first.stdout, first.stderr):  # as when an engine loses its client
        pipe.close()
    assert runner.sh("echo twice", call="once").stdout == b"done\n"
    first.wait(DEADLINE_S)


def test_a_call_whose_runner_was_killed_has_the_code_137(runner, tmp_path):
    first = runner.start(
        ["sh", "-c", f"echo $PPID >{tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 60"]
    )
    wait_for((tmp_path / "pid").exists, "the call has not begun")
    first.kill()
    first.communicate()
    result = runner.sh("echo twice", call="call-0")
    assert (result.code, result.stdout) == (137, b"")
    assert not processes_of(tmp_path / "calls/call-0")


def test_the_whole_session_is_killed_at_the_deadline(runner, tmp_path):
    begun = time.monotonic()
    result = runner.sh(f"trap '' TERM; (trap '' TERM; echo $$ >{tmp_path}/pid; sleep 61007) & sleep 61007", timeout=0.5)
    assert (result.code, result.ended) == (137, "timeout")
    assert time.monotonic() - begun < 10
    assert not processes_of(tmp_path / "calls/call-0")


def processes_of(call):
    session = int((call / "session").read_text())
    return [process for process in psutil.process_iter() if session_of(process) == session]


def session_of(process):
    with suppress(psutil.Error, ProcessLookupError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return os.getsid(process.pid)
    return None


def test_a_call_outlives_its_deadline_if_its_timer_was_killed_and_the_next_caller_ends_it(runner, tmp_path):
    first = runner.start(["sh", "-c", f"echo $$ >{tmp_path}/pid; sleep 61008"], timeout=0.5)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the call has not begun")
    kill_timer(tmp_path)
    time.sleep(1)
    assert first.poll() is None
    waiter = threading.Thread(target=first.communicate)
    waiter.start()
    result = runner.sh("echo twice", call="call-0", timeout=0.5)
    assert (result.code, result.ended) == (137, "timeout")
    waiter.join(DEADLINE_S)


def kill_timer(folder):
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "stop" in words and f"{folder}/calls/call-0" in words:
            os.killpg(process.pid, signal.SIGKILL)
            return
    raise AssertionError("there is no timer")


def test_what_leaves_the_session_goes_on(runner, tmp_path):
    result = runner.sh(f"setsid sleep 3 & echo $! >{tmp_path}/pid; echo left", timeout=5)
    assert result.stdout == b"left\n"
    assert psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("max_bytes", [0, 1, 10, 1000])
def test_of_long_output_both_ends_remain(runner, max_bytes):
    result = runner.sh("seq 1 3000; seq 1 3000 >&2", max_bytes=max_bytes)
    whole = "".join(f"{number}\n" for number in range(1, 3001)).encode()
    half = max_bytes // 2
    for output in (result.stdout, result.stderr):
        assert output == whole[:half] + (whole[-half:] if half else b"")
    assert result.truncated


def test_output_that_just_fits_is_whole(runner):
    result = runner.sh("printf 0123456789", max_bytes=10)
    assert (result.stdout, result.truncated) == (b"0123456789", False)


def test_after_a_larger_fence_calls_are_refused_and_effects_do_not_happen(runner, tmp_path):
    assert runner.sh("echo first", fence=1, call="first").stdout == b"first\n"
    runner.fence(2)
    for call in ("second", "first"):
        with pytest.raises(FencedError):
            runner.sh(f"touch {tmp_path}/effect", fence=1, call=call)
    assert not (tmp_path / "effect").exists()
    assert runner.sh("echo second", fence=2, call="second").stdout == b"second\n"


def test_fences_are_numbers(runner):
    runner.fence(9)
    assert runner.sh("echo larger", fence=10).stdout == b"larger\n"


def test_a_command_can_be_interrupted(runner):
    """A shell starts what it puts into the background with SIGINT ignored."""
    assert runner.run("python3", "-c", "import signal; print(signal.getsignal(signal.SIGINT))").stdout == (
        b"<built-in function default_int_handler>\n"
    )


def test_a_command_keeps_the_umask_and_has_no_other_file_open(runner):
    assert runner.sh("umask; ls /proc/self/fd").stdout.split() == [b"0022", b"0", b"1", b"2", b"3"]


def test_the_first_process_ends_after_its_time_with_a_code_of_its_own(runner):
    begun = time.monotonic()
    ended = subprocess.run([*runner.shell, runner.file, "live", "1"], check=False, timeout=DEADLINE_S)
    assert ended.returncode == 3
    assert 0 < time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "stdout",
    [b"", b"exited 0 1.0 2.0 0 5 0\nout", b"exited 0 1.0 2.0 0 0 5\n", b"not a reply", b"exited 0 1.0 2.0 0 0"],
    ids=["nothing", "half of stdout", "half of stderr", "something else", "half of the first line"],
)
def test_a_reply_that_is_not_whole_is_none(stdout):
    assert parse_reply(stdout, b"") is None
