"""How runs end whose user code fails late, or that cannot learn: the reason is on the terminal."""

import json

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.queue.feed import Feed
from stream.records import Prompt
from tests.cases.ports import free_port
from workers.demo.base_models import write_base_model
from workers.role.exit_codes import ExitCode

pytestmark = pytest.mark.usefixtures("preloaded")

MAZE = """
class Maze:
    def rows(self) -> list:
        return [{"number": n} for n in range(10)]

    def reset(self, **row) -> str:
        self.steps = []
        return "Find the way out."

    def go(self, direction: str) -> str:
        "Go one step.\\n\\nArgs:\\n    direction: left or right."
        self.steps.append(direction)
        return "a wall"

    def get_reward(self) -> float:
        return float(self.steps == ["left", "right"])
"""


def test_a_maze_whose_tools_are_never_called_ends_with_why_it_was_untrained(project):
    (project.folder / "world.py").write_text(MAZE)
    project.table |= {"environments": {"maze": f"{project.folder}/world.py:Maze"}, "rewards": []}
    del project.table["data"]["path"]
    project.table["train"]["batch_size"] = 2
    result = project.run("run", str(project.write()))
    assert result.returncode == ExitCode.UNTRAINED, f"{result.stderr}\n{project.logs()}"
    for words in (
        "10 of 10 groups had equal rewards (0.0); nothing was trained",
        "mean reward 0.000 over 40 completions",
        "no tool was called",
        "of completions were truncated",
        "Find the way out.",
    ):
        assert words in result.stdout, result.stdout
    warning = "the last 8 groups each had equal rewards (0.0), so they teach nothing"
    assert result.stderr.count(warning) == 1, result.stderr
    assert warning in (project.run_folder / "warnings.jsonl").read_text()
    summary = json.loads((project.run_folder / "summary.json").read_text())
    assert summary["why_untrained"].startswith("10 of 10 groups had equal rewards")
    assert summary["totals"]["tool_calls"] == 0


LATE = """
calls = 0


def exact(completions, number, **columns):
    global calls
    calls += 1
    if calls > 3:  # the preflight calls it once
        lookup(number)
    return [float(i) for i in range(len(completions))]


def lookup(number):
    return {}[number[0]]
"""


def test_a_reward_that_raises_later_ends_the_run_with_its_place(project):
    (project.folder / "rewards.py").write_text(LATE)
    project.prompts(40)
    project.table |= {"rewards": [{"ref": f"{project.folder}/rewards.py:exact"}]}
    result = project.run("run", str(project.write()), "--json")
    assert result.returncode == ExitCode.FAILURE
    line = LATE.splitlines().index("    return {}[number[0]]") + 1
    for words in (
        "reward:raised (reward function exact: KeyError:",
        f"(rewards.py, line {line})",
        f'  File "{project.folder}/rewards.py", line {line}, in lookup\n    return {{}}[number[0]]',
    ):
        assert words in result.stderr, result.stderr
    assert "/envs/rewards/" not in result.stderr
    failure = json.loads(result.stdout)["failure"]
    assert failure["cause"]["source"] == "reward function exact"
    assert (failure["cause"]["file"], failure["cause"]["line"]) == (f"{project.folder}/rewards.py", line)
    assert "Traceback" in failure["cause"]["traceback"]


REWARD = """
import time

import anyio


def exact(completions, number, **columns):
    if number[0] >= 8:
        FAULT
    return [float(i) for i in range(len(completions))]
"""
WORLD = """
import time

from envs.contract import EnvironmentFailure


class World:
    def reset(self, number, **row):
        self.number = number
        if number >= 8:
            FAULT_IN_RESET
        return "Look around."

    def look(self) -> str:
        "Look around."
        return "nothing"

    def get_reward(self):
        if self.number >= 8:
            FAULT_IN_REWARD
        return float(id(self) % 7)
"""
AGENT = """
import threading

from envs.contract import AgentEnvironment


class World(AgentEnvironment):
    def reset(self, number, **row):
        self.number = number

    def run_episode(self, endpoint, sampling):
        raise ConnectionError(f"the simulator is gone at row {self.number}")

    def get_reward(self):
        return 0.0
"""
IN_REWARD = {
    "raises on most rows": (
        "raise LookupError(f'no table for {number[0]}')",
        {},
        "reward:raised",
        "LookupError: no table",
    ),
    "hangs": ("time.sleep(60)", {"timeout_s": 0.5}, "reward:timeout", "TimeoutError"),
    "raises in a killable process": ("{}['a']", {"processes": 1}, "reward:raised", "KeyError: 'a'"),
    "raises within a library": ("__import__('json').loads('{')", {}, "reward:raised", "JSONDecodeError"),
    "leaves the process": ("raise SystemExit('enough')", {}, "reward:raised", "SystemExit: enough"),
}
IN_WORLD = {
    "reset raises": ("raise RuntimeError('no room')", "pass", "failed:env_reset", "RuntimeError: no room"),
    "reset hangs": ("time.sleep(60)", "pass", "failed:env_reset", "TimeoutError"),
    "the world fails": (
        "raise EnvironmentFailure('offline')",
        "pass",
        "failed:env_reset",
        "EnvironmentFailure: offline",
    ),
    "get_reward raises": ("pass", "[][3]", "reward:raised", "IndexError: list index out of range"),
}


def assert_ends_with(project, file: str, fault: str, reason: str, error: str) -> None:
    """The run fails for this reason, and its terminal shows the error, its file and its line."""
    project.prompts(40)
    project.table["data"]["shuffle"] = False
    result = project.run("run", str(project.write()), "--json")
    assert result.returncode == ExitCode.FAILURE, f"{result.stdout}\n{result.stderr}"
    path = project.folder / file
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if text.strip() == fault)
    for words in (reason, error, f"({file}, line {line})", f'  File "{path}", line {line}, in '):
        assert words in result.stderr, result.stderr
    cause = json.loads(result.stdout)["failure"]["cause"]
    assert (cause["file"], cause["line"]) == (str(path), line)


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", IN_REWARD)
def test_a_reward_function_that_fails_later(project, fault):
    code, options, reason, error = IN_REWARD[fault]
    (project.folder / "rewards.py").write_text(REWARD.replace("FAULT", code))
    project.table["rewards"] = [{"ref": f"{project.folder}/rewards.py:exact", **options}]
    assert_ends_with(project, "rewards.py", code, reason, error)


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", IN_WORLD)
def test_an_environment_that_fails_later(project, fault):
    in_reset, in_reward, reason, error = IN_WORLD[fault]
    world = WORLD.replace("FAULT_IN_RESET", in_reset).replace("FAULT_IN_REWARD", in_reward)
    (project.folder / "world.py").write_text(world)
    project.table |= {"environments": {"world": f"{project.folder}/world.py:World"}, "rewards": []}
    project.table["rollout"]["call_timeout_s"] = 1.0
    assert_ends_with(project, "world.py", in_reset if in_reset != "pass" else in_reward, reason, error)


CRASH = """
import ctypes


class World:
    def reset(self, number, **row):
        self.number = number
        if number == 8:
            ctypes.string_at(0)
        return "Look around."

    def get_reward(self):
        return float(id(self) % 7)
"""


@pytest.mark.full
@pytest.mark.timeout(240)
def test_code_that_crashes_in_c_is_named_with_its_line_once_its_prompt_is_a_dead_letter(project):
    (project.folder / "world.py").write_text(CRASH)
    project.table |= {"environments": {"world": f"{project.folder}/world.py:World"}, "rewards": []}
    project.table["data"]["shuffle"] = False
    project.table["queue"] |= {"lease_s": 1.0}
    result = project.run("run", str(project.write()), "--json")
    summary = json.loads(result.stdout)
    assert summary["dead"] == 1, f"{result.stderr}\n{project.logs()}"
    cause = summary["causes"]["dead:infra"]
    line = CRASH.splitlines().index("            ctypes.string_at(0)") + 1
    assert cause["exception"].startswith("7 of its workers in a row died or stopped responding"), cause
    assert cause["exception"].endswith("in environment world, prompt prompts:0:8 (World.reset): Segmentation fault")
    assert (cause["file"], cause["line"]) == (f"{project.folder}/world.py", line)
    assert "/envs/" not in cause["traceback"]


SLOW_TOOL = """
import time


class World:
    def reset(self, number, **row):
        self.number, self.calls = number, 0

    def add(self, a: int, b: int) -> int:
        "Add two numbers.\\n\\nArgs:\\n    a: The first.\\n    b: The second."
        time.sleep(60)

    subtract = multiply = add

    def get_reward(self):
        return float(id(self) % 7)
"""


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_tool_that_hangs_is_shown_with_the_line_where_it_stands(project):
    write_base_model("calculator", project.folder / "model")
    (project.folder / "world.py").write_text(SLOW_TOOL)
    rows = [{"prompt": f"Start with {n}, plus 3, then plus 4.", "number": n} for n in range(8)]
    (project.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    project.table |= {"environments": {"world": f"{project.folder}/world.py:World"}, "rewards": []}
    project.table["model"]["path"] = str(project.folder / "model")
    project.table["engine"]["max_model_len"] = 512
    project.table["rollout"] |= {"call_timeout_s": 0.5, "max_tokens_per_turn": 32, "max_tokens": 128}
    result = project.run("run", str(project.write()), "--json")
    assert result.returncode == ExitCode.SUCCESS, f"{result.stderr}\n{project.logs()}"
    cause = json.loads(result.stdout)["causes"]["tool_error"]
    line = SLOW_TOOL.splitlines().index("        time.sleep(60)") + 1
    assert (cause["file"], cause["line"]) == (f"{project.folder}/world.py", line)
    assert cause["source"].startswith("environment world, tool ")
    assert "TimeoutError" in cause["exception"]


@pytest.mark.full
@pytest.mark.timeout(180)
def test_an_engine_without_memory_for_its_cache_ends_the_run_with_its_error(project):
    project.table["engine"] |= {"max_batch_size": 2_000_000, "max_model_len": 512}
    result = project.run("run", "--no-check", str(project.write()))
    assert result.returncode == ExitCode.FAILURE, result.stdout
    for words in ("engine-0 exited with code 1", "MemoryError", "lower engine.max_batch_size"):
        assert words in result.stderr, result.stderr


BLOCKS = """
import time


async def exact(completions, number, **columns):
    if number[0] >= 4:
        time.sleep(100)
    return [float(i) for i in range(len(completions))]
"""


@pytest.mark.full
@pytest.mark.timeout(180)
def test_an_async_reward_that_blocks_is_named_when_the_run_stands_still(project):
    (project.folder / "rewards.py").write_text(BLOCKS)
    project.table["rewards"] = [{"ref": f"{project.folder}/rewards.py:exact"}]
    project.table["data"]["shuffle"] = False
    project.table["abort"] = {"stall_timeout_s": 12.0}
    project.table["score"] = {"workers": 1}
    project.table["queue"] |= {"shutdown_timeout_s": 1.0}
    result = project.run("run", "--no-check", str(project.write()), "--json")
    assert result.returncode == ExitCode.FAILURE, result.stdout
    cause = json.loads(result.stdout)["failure"]["cause"]
    line = BLOCKS.splitlines().index("        time.sleep(100)") + 1
    assert (cause["file"], cause["line"]) == (f"{project.folder}/rewards.py", line), result.stderr
    assert "blocks the event loop of score-0" in result.stderr


@pytest.mark.full
@pytest.mark.timeout(180)
def test_an_environment_whose_own_loop_raises(project):
    (project.folder / "world.py").write_text(AGENT)
    project.table |= {"environments": {"world": f"{project.folder}/world.py:World"}, "rewards": []}
    fault = 'raise ConnectionError(f"the simulator is gone at row {self.number}")'
    assert_ends_with(project, "world.py", fault, "failed:env_step", "ConnectionError: the simulator is gone")


@pytest.mark.full
@pytest.mark.timeout(180)
def test_a_reward_that_raises_on_one_row_is_shown_at_the_end_of_a_run_that_goes_on(project):
    code = REWARD.replace("number[0] >= 8", "number[0] == 30").replace("FAULT", "raise LookupError('row 30')")
    (project.folder / "rewards.py").write_text(code)
    project.table["rewards"] = [{"ref": f"{project.folder}/rewards.py:exact"}]
    project.prompts(40)
    project.table["data"]["shuffle"] = False
    result = project.run("run", str(project.write()))
    assert result.returncode == ExitCode.SUCCESS, result.stderr
    line = code.splitlines().index("        raise LookupError('row 30')") + 1
    assert f"reward:raised: reward function exact: LookupError: row 30 (rewards.py, line {line})" in result.stdout


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_trainer_without_a_supervisor_names_the_error_that_keeps_groups_from_it(project, redis_url):
    """Roles started one by one, with a feeder that is not ours: it names an environment that nobody has."""
    project.table["run"]["redis"] = redis_url
    project.table["abort"] = {"stall_timeout_s": 20.0}
    project.table["queue"] |= {"max_attempts": 100}
    (project.folder / "world.py").write_text(MAZE)
    project.table |= {"environments": {"maze": f"{project.folder}/world.py:Maze"}, "rewards": []}
    port = free_port()
    file, engine = str(project.write()), ("--engine", f"http://127.0.0.1:{port}")
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "Go."}], environment="nowhere")

    async def feed() -> None:
        async with connect(redis_url, "test", reconnect_s=5.0) as connection:
            await Feed(connection, 1000).put([prompt], "", "1;")

    anyio.run(feed)
    others = [project.start("serve", file, "--port", str(port)), project.start("rollout", file, *engine)]
    try:
        result = project.run("train", file, *engine)
    finally:
        for each in others:
            each.kill()
            each.communicate()
    assert result.returncode == ExitCode.PERMANENT, result.stderr
    for words in (
        "no scored group arrived within abort.stall_timeout_s = 20 s",
        "groups has 0 waiting, 0 claimed",
        "the last error in prompts was at",
        "environment 'nowhere' is unknown",
    ):
        assert words in result.stderr, result.stderr
    assert result.stderr.splitlines()[-1] == "caused by stage prompts: prompt p: environment 'nowhere' is unknown"
