"""A process that the fork server starts equals one that the interpreter starts, but sooner, as the caller's child."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from workers.run.fork_server import ForkServer
from workers.run.process_launcher import ProcessLauncher
from workers.run.program import Program
from workers.run.role_specs import RoleSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forking is for Linux")

REPORT = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "path": sys.path[0], "name": __name__, "parent": os.getppid(),
    "leads": os.getpid() == os.getsid(0), "folder": os.getcwd(), "variable": os.environ.get("VARIABLE"),
    "ps": open("/proc/self/cmdline").read().rstrip("\\0"),
    "loaded": "sunau" in sys.modules}))
"""


@pytest.fixture(scope="module")
def server():
    server = ForkServer.start()
    yield server
    server.close()


class Started:
    def __init__(self, server: ForkServer, folder: Path, *command: str, **options) -> None:
        self.file = folder / "output"
        program = Program.parse([sys.executable, *command])
        assert program is not None
        with self.file.open("wb") as file:
            self.pid = server.spawn(
                program,
                environment=options.pop("environment", dict(os.environ)),
                folder=folder,
                output=(file.fileno(), file.fileno()),
                **options,
            )

    def wait(self) -> tuple[int, str]:
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), self.file.read_text()


@pytest.mark.parametrize("command", [["-c", REPORT], ["-m", "report"], ["report.py"], ["-P", "report.py"]])
def test_a_forked_program_has_the_same_state_as_under_a_new_interpreter(server, tmp_path, command):
    (tmp_path / "report.py").write_text(REPORT)
    environment = {**os.environ, "VARIABLE": "here"}
    new = subprocess.run(
        [sys.executable, *command, "a", "b c"], cwd=tmp_path, env=environment, capture_output=True, check=True
    )
    code, output = Started(server, tmp_path, *command, "a", "b c", environment=environment).wait()
    assert code == 0
    assert json.loads(output) == json.loads(new.stdout) | {"leads": True}


@pytest.mark.parametrize(
    ("code", "exit_code", "output"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('bad')", 1, "bad\n"),
        ("raise OSError('the disk is full')", 1, "OSError: the disk is full\n"),
        ("import os; os._exit(4)", 4, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end\n"),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
            0,
            "late\n",
        ),
    ],
)
def test_a_forked_program_exits_as_under_a_new_interpreter(server, tmp_path, code, exit_code, output):
    ended, written = Started(server, tmp_path, "-c", code).wait()
    assert ended == exit_code
    assert written.endswith(output)


def test_modules_are_imported_before_the_fork(tmp_path):
    with closing(ForkServer.start()) as own:  # what it imports stays imported
        assert json.loads(Started(own, tmp_path, "-c", REPORT).wait()[1])["loaded"] is False
        _, output = Started(own, tmp_path, "-c", REPORT, modules=["no_such_module", "sunau"]).wait()
    assert json.loads(output)["loaded"] is True


@pytest.mark.parametrize("command", [["sh", "-c", "true"], [sys.executable, "-O", "x.py"], [sys.executable]])
def test_other_commands_are_started_as_new_processes(command):
    assert Program.parse(command) is None


PARENT = """
import os, sys, time
from pathlib import Path
from workers.run.fork_server import ForkServer
from workers.run.program import Program
server = ForkServer.start()
program = Program.parse([sys.executable, "-c", "import os, time; os.write(1, b'runs' + bytes([10])); time.sleep(1000)"])
pid = server.spawn(program, environment=dict(os.environ), folder=Path.cwd(), output=(1, 2))
os.write(1, b"%d %d\\n" % (pid, server._process.pid))  # at once: both processes write to one pipe
time.sleep(1000)
"""


def test_server_and_program_end_with_a_killed_caller():
    caller = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    lines = [caller.stdout.readline(), caller.stdout.readline()]
    (pids,) = [line.split() for line in lines if line != "runs\n"]
    caller.kill()
    caller.wait()
    deadline = time.monotonic() + 20
    while any(_runs(int(pid)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    caller.stdout.close()


NESTED = """
import os, sys
from pathlib import Path
from workers.run.fork_server import ForkServer
from workers.run.program import Program
server = ForkServer.start()
program = Program.parse([sys.executable, "-c", "import os, sys; print(os.getppid(), 'colorsys' in sys.modules)"])
pid = server.spawn(program, environment=dict(os.environ), folder=Path.cwd(), output=(1, 2))
print(os.getpid(), os.waitpid(pid, 0)[1], flush=True)
"""


def test_a_program_may_inherit_a_server_with_all_its_modules(server, tmp_path):
    code, output = Started(server, tmp_path, "-c", NESTED, modules=["colorsys"], nested=True).wait()
    assert code == 0, output
    grandchild, program = (line.split() for line in output.splitlines())
    assert grandchild == [program[0], "True"]
    assert program[1] == "0"


def test_a_hinted_module_is_imported_while_no_request_waits_and_one_that_does_not_exist_is_skipped(server, tmp_path):
    server.preload(["no_such_module", "stringprep"])
    deadline = time.monotonic() + 20
    while "True" not in Started(server, tmp_path, "-c", "import sys; print('stringprep' in sys.modules)").wait()[1]:
        assert time.monotonic() < deadline


async def test_a_role_is_started_by_a_new_interpreter_if_the_server_is_gone(tmp_path):
    spec = RoleSpec(role="feed", command=(sys.executable, "-c", "import sys; sys.exit(7)"), modules=("colorsys",))
    with ProcessLauncher() as launcher, (tmp_path / "log").open("wb") as log:
        for _ in range(2):
            process = await launcher.launch(spec, log.fileno())
            assert await process.wait() == 7
            await process.close()
            server = launcher._fork_servers[spec.modules]
            if server is not None:
                server.close()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
