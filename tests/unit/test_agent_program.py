"""`agent:command`: a program in a sandbox asks the endpoint for its turns, and whatever it does, the episode ends."""

import os
import re
import tempfile
import time
from pathlib import Path

import anyio
import psutil
import pytest

from envs.factory import EnvironmentFactory
from envs.programs.outside import remove_folder
from envs.rewards import merge_parts
from envs.sandboxes.bubblewrap import NOBODY, sandbox_problem
from envs.snapshot import thaw
from stream.errors import PenstockError
from stream.validity import Measured, RolloutReason, TruncationReason, Unmeasured
from tests.adapters.episodes import completions

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(sandbox_problem()), reason=f"needs sandboxes: {sandbox_problem()}"),
]

ASK = """
import json, os, sys, urllib.request
def ask(*messages):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": m} for m in messages]}).encode()
    request = urllib.request.Request(sys.argv[1] + "/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
"""Beginning of a program in plain Python; the endpoint is its first argument."""


async def load(args):
    return await anyio.to_thread.run_sync(EnvironmentFactory.load, "agent:command", args)


async def agent(program, tmp_path, *, files=None, **args):
    """An environment that runs a program of these lines in a folder of these files."""
    folder = tmp_path / "task"
    folder.mkdir()
    for name, text in ({"agent.py": ASK + program} | (files or {})).items():
        (folder / name).write_text(text)
    command = ["/usr/bin/python3", "agent.py", "{endpoint}", str(tmp_path)]
    return await load({"command": command, "folder": str(folder)} | args)


CHECK = {"command": ["/usr/bin/python3", "-I", "check.py"]}


def existing(folders):
    return [folder for folder in folders if Path(folder).exists()]


def programs(tmp_path):
    """Process ids of the agents of a test."""
    found = psutil.process_iter(["cmdline"])
    return {process.pid for process in found if any(str(tmp_path) in part for part in process.info["cmdline"] or ())}


async def test_a_program_works_in_a_copy_of_the_folder_and_a_command_measures_it(tmp_path, monkeypatch):
    made, make = [], tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: made.append(make(**options)) or made[-1])
    program = 'open("answer.txt", "w").write(ask("hello"))\nopen("check.py", "w").write("print(100)")\n'
    check = 'print("checked")\nprint(float(open("answer.txt").read() == "hi"))\n'
    factory = await agent(program, tmp_path, files={"check.py": check}, reward=CHECK)
    one, two = await completions(factory, ["hi"], n=2)
    for completion in (one, two):
        assert (completion.failure, completion.truncated, completion.turns) == (None, None, 1)
        assert merge_parts(completion.parts) == Measured(1.0)
        assert len(completion.rows) == 1
    assert sorted(file.name for file in (tmp_path / "task").iterdir()) == ["agent.py", "check.py"]
    assert len(made) == 2
    assert existing(made) == []


async def test_columns_fill_the_command_the_folder_and_the_environment(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.py").write_text(ASK + 'print(ask(os.environ["WORD"] + sys.argv[2]))')
    args = {"command": ["/usr/bin/python3", "run.py", "{endpoint}", "{task}"], "folder": f"{tmp_path}/{{task}}"}
    factory = await load(args | {"env": {"WORD": "do {task} at {base_url}: "}})
    (completion,) = await completions(factory, ["done"], fields={"task": "two"})
    assert completion.prompt_messages[0]["content"].startswith("do two at http://127.0.0.1:8000/")
    (refused,) = await completions(factory, ["done"], fields={"task": "../one"})
    assert refused.failure.reason is RolloutReason.ENV_RESET
    assert "names no folder" in refused.failure.detail


async def test_pwd_is_the_folder_in_which_the_program_starts(tmp_path):
    (completion,) = await completions(await agent("ask(os.environ['PWD'] + ' ' + os.getcwd())", tmp_path), ["one"])
    assert completion.prompt_messages[0]["content"] == "/sandbox/work /sandbox/work"


async def test_the_prompt_is_an_argument():
    factory = await load({"command": ["/bin/echo", "asked: {prompt}"]})
    (completion,) = await completions(factory, [])
    assert completion.failure.detail.endswith("asked: Go.")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("print('no key'); sys.exit(3)", "ended with exit code 3 and had not asked for a turn.*no key"),
        ("import time; time.sleep(60)", "was still running and had not asked for a turn"),
        ("os.kill(os.getpid(), 9)", "ended with exit code 137 and had not"),
    ],
    ids=["exits", "waits", "kills itself"],
)
async def test_a_program_that_asks_for_nothing_is_invalid_and_the_reason_is_its_last_words(program, why, tmp_path):
    limits = {"timeout_s": 1.5 if "sleep" in program else 60}
    (completion,) = await completions(await agent(program, tmp_path, limits=limits), [])
    assert completion.failure.reason is RolloutReason.ENV_STEP
    assert re.search(why, completion.failure.detail, re.DOTALL), completion.failure.detail


async def test_a_command_that_cannot_be_started_is_named(tmp_path):
    factory = await load({"command": ["nonesuch", "{endpoint}"]})
    (completion,) = await completions(factory, [])
    assert "nonesuch: No such file or directory" in completion.failure.detail


HARMFUL = {
    "ignores SIGTERM": "import signal, time; signal.signal(15, signal.SIG_IGN); ask('a'); time.sleep(300)",
    "forks away": "ask('a')\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  import time; time.sleep(300)",
    "writes 100 MB": "ask('a')\nfor _ in range(1600): print('x' * 65536)",
    "opens 1,000 connections": (
        "import socket\nask('a')\nopen_ = []\nfor _ in range(1000):\n"
        " try: open_.append(socket.create_connection(('127.0.0.1', 8000), timeout=1))\n except OSError: pass"
    ),
    "never closes": "import threading, time; ask('a'); threading.Thread(target=time.sleep, args=(300,)).start()",
}


@pytest.mark.parametrize("program", HARMFUL.values(), ids=HARMFUL)
async def test_whatever_a_program_does_the_episode_ends_and_nothing_is_left(program, tmp_path):
    began = time.monotonic()
    check = {"command": ["/usr/bin/python3", "-c", "print(0.5)"]}
    (completion,) = await completions(await agent(program, tmp_path, reward=check, limits={"timeout_s": 8}), ["one"])
    assert time.monotonic() - began < 60
    assert completion.turns == 1
    assert merge_parts(completion.parts) == Measured(0.5)
    assert programs(tmp_path) == set()


FILL = {
    "files": "for number in range(200): open(f'{number}', 'wb').write(b'x' * (1 << 20))",
    "deleted files": (
        "kept = []\nfor _ in range(200):\n file = open('a', 'wb', buffering=0)\n os.remove('a')\n"
        " file.write(b'x' * (1 << 20)); kept.append(file)"
    ),
    "a child that left": (
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        "  for number in range(200): open(f'{number}', 'wb').write(b'x' * (1 << 20))\n  time.sleep(300)"
    ),
}


@pytest.mark.parametrize("program", FILL.values(), ids=FILL)
async def test_a_program_that_fills_the_disk_is_killed_and_measured_and_its_last_words_say_why(program, tmp_path):
    began = time.monotonic()
    program = f"import time\nask('a')\n{program}\ntime.sleep(300)"
    check = {"command": ["/usr/bin/python3", "-c", "print(0.5)"]}
    factory = await agent(program, tmp_path, reward=check, limits={"folder_mb": 100})
    (completion,) = await completions(factory, ["one"])
    assert time.monotonic() - began < 60
    assert (completion.failure, completion.truncated) == (None, None)
    assert merge_parts(completion.parts) == Measured(0.5)
    ended = thaw(completion.snapshot, factory)
    assert (ended.exit_code, ended.timed_out, ended.over_quota) == (137, False, True)
    assert ended.output.endswith("it added more than limits.folder_mb = 100 to its folder]")
    assert programs(tmp_path) == set()


async def test_a_program_may_add_as_much_as_its_quota_to_a_folder_that_is_larger(tmp_path):
    program = "import time\nask('a')\nopen('b', 'wb').write(b'x' * (60 << 20))\ntime.sleep(2.5)"
    factory = await agent(program, tmp_path, files={"a": "x" * (110 << 20)}, limits={"folder_mb": 100})
    (completion,) = await completions(factory, ["one"])
    ended = thaw(completion.snapshot, factory)
    assert (ended.exit_code, ended.over_quota) == (0, False)


def test_a_folder_is_removed_also_where_its_rights_were_taken_away():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        home = Path(folder, "home")
        if (child := os.fork()) == 0:  # as a user who is not root
            try:
                if os.geteuid() == 0:
                    os.setuid(NOBODY)
                (home / "a" / "b").mkdir(parents=True)
                (home / "a" / "b" / "c").write_text("c")
                (home / "a" / "b").chmod(0)
                (home / "a").chmod(0)
                remove_folder(str(home))
            finally:
                os._exit(home.exists())
        assert os.waitpid(child, 0)[1] == 0


async def test_a_program_cannot_use_up_the_files_of_its_worker(tmp_path):
    """It connects to the worker's socket itself, past the limit of what runs in its sandbox."""
    program = """
import resource, socket, time
ask("a")
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept = []
for _ in range(600):
    kept.append(socket.socket(socket.AF_UNIX)); kept[-1].settimeout(0.5)
    try: kept[-1].connect("/sandbox/endpoint.sock"); kept[-1].send(b"POST /v1/messages")
    except OSError: break
print(len(kept), flush=True)
time.sleep(300)
"""
    most = 0

    async def look():
        nonlocal most
        while True:
            most = max(most, psutil.Process().num_fds())
            await anyio.sleep(0.05)

    factory = await agent(program, tmp_path, limits={"timeout_s": 6})
    before = psutil.Process().num_fds()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        (completion,) = await completions(factory, ["one"])
        tasks.cancel_scope.cancel()
    assert int(thaw(completion.snapshot, factory).output.split()[0]) >= 64
    assert most - before < 3 * 64 + 60


async def test_a_program_reaches_nothing_but_the_endpoint_and_sees_nothing_of_the_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "s3cret")
    (tmp_path / "gold.txt").write_text("gold")
    program = f"""
import socket
ask("a")
found = []
for host, port in (("127.0.0.1", 6379), ("1.1.1.1", 53), ("172.17.0.1", 22)):
    try: socket.create_connection((host, port), timeout=1); found.append(host)
    except OSError: pass
try: found.append(open({str(tmp_path / "gold.txt")!r}).read())
except OSError: pass
found += [key for key in os.environ if "SECRET" in key]
for entry in os.listdir("/proc"):
    if entry.isdigit() and "s3cret" in open("/proc/" + entry + "/environ", errors="replace").read(): found.append(entry)
print("FOUND", found)
"""
    factory = await agent(program, tmp_path, reward={"command": ["/usr/bin/python3", "-c", "print(1)"]})
    (completion,) = await completions(factory, ["one"])
    assert completion.failure is None
    assert thaw(completion.snapshot, factory).output.strip() == "FOUND []"


async def test_a_cancelled_episode_leaves_no_process(tmp_path):
    program = "ask('a')\nimport time; time.sleep(300)"
    (completion,) = await completions(
        await agent(program, tmp_path, limits={"timeout_s": 200}), ["one"], episode_timeout_s=2.0
    )
    assert completion.truncated in (TruncationReason.TOOL_TIME, TruncationReason.WALL_CLOCK)
    assert programs(tmp_path) == set()


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("print(1)\nprint('no number')", Measured(-1.0)),
        ("print('nan')", Measured(-1.0)),
        ("import time; time.sleep(60)", Measured(-1.0)),
        ("raise SystemExit('broken')", Measured(-1.0)),
        ("print('-2.5e-1')", Measured(-0.25)),
    ],
    ids=["text", "nan", "hangs", "raises", "number"],
)
async def test_a_reward_without_a_number_is_the_worst_one(check, expected, tmp_path):
    factory = await agent(
        "ask('a')",
        tmp_path,
        files={"check.py": check},
        reward=CHECK | {"worst": -1.0, "timeout_s": 1.5 if "sleep" in check else 60},
    )
    (completion,) = await completions(factory, ["one"])
    assert merge_parts(completion.parts) == expected


async def test_a_reward_command_that_cannot_be_started_measures_nothing(tmp_path):
    (completion,) = await completions(await agent("ask('a')", tmp_path, reward={"command": ["nonesuch"]}), ["one"])
    assert isinstance(merge_parts(completion.parts), Unmeasured)


@pytest.mark.parametrize(
    "args", [{}, {"command": "ls"}, {"command": ["ls"], "network": "open"}, {"command": ["ls"], "limits": {"cpus": 1}}]
)
def test_wrong_arguments_are_named(args):
    with pytest.raises((PenstockError, TypeError), match=r"command|network|cpus"):
        EnvironmentFactory.load("agent:command", args)
