"""Where an error came from: found in user code, carried through records and logs, shown without our frames."""

import json
import sysconfig
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import anyio
import pytest

from envs.call import CallRunner, Failed, error_cause, outcome_cause
from envs.factory import EnvironmentFactory
from stream.causes import MAX_TRACEBACK, ErrorCause, cause_from_crash, cause_from_traceback, parse_cause
from stream.errors import EngineError, PenstockError, ReferenceNotFoundError
from stream.queue.in_flight import CompletionInFlight, GroupInFlight
from stream.records import Completion, Failure, Group, Prompt, RewardPart, ToolRun
from stream.validity import RewardReason, RolloutReason, Unmeasured
from workers.launch.children import ChildProcess
from workers.launch.specs import ProcessSpec
from workers.launch.watch import describe_longest
from workers.role.context import find_cause
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.tool_formats.parsing import ToolCall
from workers.train.groups.group_checker import failure_causes


def line_of(text: str) -> int:
    with Path(__file__).open() as file:
        return next(i for i, line in enumerate(file, 1) if line.strip().endswith(f"# {text}"))


def broken() -> None:
    {}["a"]  # raises


class Slow:
    def reset(self, **row) -> None:
        pass

    def look(self) -> str:
        """Look around."""
        time.sleep(0.5)  # hangs
        return ""

    async def listen(self) -> str:
        """Listen."""
        await anyio.sleep(5)  # never ends in time
        return ""

    def fall(self) -> str:
        """Fall."""
        raise RuntimeError("down")  # falls


def test_an_exception_has_its_place_and_no_frames_of_ours():
    outcome = anyio.run(CallRunner(anyio.CapacityLimiter(1)).call, broken, {}, 5.0)
    cause = outcome_cause(outcome, "reward function exact")
    assert cause.place == f"{__file__}:{line_of('raises')}"
    assert cause.exception == "KeyError: 'a'"
    assert "/envs/call/" not in cause.traceback
    assert cause.traceback.splitlines()[-1] == "KeyError: 'a'"


@pytest.mark.parametrize(
    ("tool", "place", "error"),
    [
        ("look", "hangs", "TimeoutError"),
        ("listen", "never ends in time", "TimeoutError"),
        ("fall", "falls", "RuntimeError: down"),
    ],
)
def test_a_tool_that_hangs_or_raises_has_its_place(tool, place, error):
    async def call() -> ErrorCause | None:
        slot = EnvironmentSlot("slow", EnvironmentFactory.from_callable(Slow), CallRunner(anyio.CapacityLimiter(1)))
        await slot.reset({}, 0, 0, 1.0)
        result = await slot.call_tool(ToolCall(tool, {}, raw=""), 0.1)
        assert result.is_error
        assert __file__ not in result.text, "the model reads only the error"
        return result.cause

    cause = anyio.run(call)
    assert cause.source == f"environment slow, tool {tool}"
    assert cause.place == f"{__file__}:{line_of(place)}"
    assert error in cause.exception


def test_an_exception_in_a_compiled_library_has_the_line_in_user_code_that_led_there():
    code = "def load(data):\n    return pq.ParquetFile(pa.BufferReader(data))\n"
    scope = {"pq": pytest.importorskip("pyarrow.parquet"), "pa": pytest.importorskip("pyarrow")}
    exec(compile(code, "/home/me/rewards.py", "exec"), scope)
    outcome = anyio.run(CallRunner(anyio.CapacityLimiter(1)).call, scope["load"], {"data": b"no parquet"}, 5.0)
    cause = outcome_cause(outcome, "reward function exact")
    assert ".pxi" in cause.traceback, "the library's last frame is of a compiled module"
    assert cause.place == "/home/me/rewards.py:2"


def test_an_error_of_ours_blames_user_code_only_if_an_exception_was_raised_there():
    def caught(inner, error: PenstockError) -> PenstockError:
        try:
            try:
                inner()
            except Exception as cause:
                raise error from cause.with_traceback(cause.__traceback__.tb_next)  # without this test's frame
        except PenstockError as raised:
            return raised

    def in_user_code() -> None:
        json.loads("{")  # reads

    assert find_cause(caught(in_user_code, EngineError("the port is in use"))).line == line_of("reads")
    compiled = compile("{}['a']", f"{sysconfig.get_path('purelib')}/own_env.py", "exec")
    in_an_installed_package = partial(exec, compiled)
    assert find_cause(caught(in_an_installed_package, EngineError("the port is in use"))) is None
    found = find_cause(caught(in_an_installed_package, ReferenceNotFoundError("it cannot be made")))
    assert found.file.endswith("own_env.py")


def test_a_cause_survives_the_log_of_its_process():
    try:
        __import__("json").loads("{")
    except ValueError as error:
        cause = error_cause(error, "reward function exact")
    log = f"2026 something\nerror: it failed\n{cause.render()}\n"
    assert parse_cause(log) == cause
    assert cause.line
    assert parse_cause("error: nothing behind it\n") is None


def test_an_error_that_our_code_raises_from_another_has_the_first_ones_place():
    try:
        try:
            broken()
        except KeyError as error:
            raise ExceptionGroup("", [error]) from None
    except ExceptionGroup as group:
        cause = error_cause(group)
    assert cause.line == line_of("raises")


ENGINE_LOG = """loading
  + Exception Group Traceback (most recent call last):
  |   File "/p/workers/launch/serve.py", line 3, in run
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/user/kernels.py", line 7, in attend
    |     allocate()
    |   File "/p/workers/local_engine/scheduler.py", line 9, in step
    |     cache = torch.zeros(size)
    | torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB
    +------------------------------------
"""


def test_the_log_of_an_engine_out_of_memory_names_the_error_and_its_place():
    cause = cause_from_traceback(ENGINE_LOG, "engine-0", ("/p/workers/",))
    assert cause.exception == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"
    assert (cause.source, cause.place) == ("engine-0", "/user/kernels.py:7")
    only_ours = "\n".join(
        line for line in ENGINE_LOG.splitlines() if "user/kernels" not in line and "allocate()" not in line
    )
    assert (
        cause_from_traceback(only_ours, "engine-0", ("/p/workers/",)).place == "/p/workers/local_engine/scheduler.py:9"
    )
    assert cause_from_traceback("it just ended\n", "engine-0", ("/p/workers/",)) is None


def test_a_long_traceback_is_cut():
    def recurse(n: int) -> None:
        recurse(n - 1) if n else broken()

    with pytest.raises(KeyError) as caught:
        recurse(200)
    assert len(error_cause(caught.value).traceback) < MAX_TRACEBACK + 200


def test_each_state_of_a_group_has_its_cause():
    cause = error_cause(KeyError("a"))
    invalid = Unmeasured(RewardReason.RAISED, "KeyError: 'a'", cause)
    group = Group(
        prompt=Prompt(id="d:0:0", messages=[], environment="maze"),
        completions=[
            Completion(index=0, reward=invalid, parts=[RewardPart(name="exact", reward=invalid)]),
            Completion(index=1, reward=Unmeasured(RewardReason.MISSING), parts=[
                RewardPart(name="env", reward=Unmeasured(RewardReason.MISSING, "returned None"))]),
            Completion(index=2, failure=Failure(reason=RolloutReason.ENGINE, detail="no answer")),
            Completion(index=3, tool_runs=[ToolRun(0.1, is_error=True, cause=cause)]),
        ],
    )  # fmt: skip
    assert {state: each.headline for state, each in failure_causes(group).items()} == {
        "reward:raised": "reward function exact: KeyError: 'a'",
        "reward:missing": "environment maze, get_reward: missing: returned None",
        "failed:engine": "environment maze: no answer",
        "tool_error": "KeyError: 'a'",
    }
    assert outcome_cause(Failed(KeyError("a"))) == cause


CRASH = """{"event": "claim"}
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 517 in string_at
  File "/home/me/world.py", line 8 in Maze.look
  File "/opt/penstock/envs/call/threads.py", line 10 in run
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner

Extension modules: msgspec._core (total: 1)
"""


def test_a_crash_in_c_has_the_line_of_the_call():
    cause = cause_from_crash(CRASH, "rollout-0", ("/opt/penstock/",))
    assert cause.headline == "rollout-0: Segmentation fault (/home/me/world.py, line 8)"
    assert "/opt/penstock/" not in cause.traceback
    assert cause.traceback.splitlines()[1:3] == [
        '  File "/home/me/world.py", line 8, in Maze.look',
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 517, in string_at',
    ]
    assert cause_from_crash("all is well", "rollout-0", ("/opt/penstock/",)) is None


def test_the_code_that_blocks_an_event_loop_is_read_from_the_log(tmp_path):
    child = ChildProcess(ProcessSpec(role="score", command=()), tmp_path)
    assert child.blocking_code(60) is None
    assert child.new_blocking_code(60) is None

    def log(seconds_ago: float, by: str) -> None:
        at = datetime.now(UTC) - timedelta(seconds=seconds_ago)
        event = {"event": "event_loop.blocked", "by": by, "timestamp": at.isoformat().replace("+00:00", "Z")}
        with child.log_file.open("a") as file:
            file.write(json.dumps(event) + "\nprinted by user code\n")

    log(100, "/a/old.py:1 old")
    assert child.blocking_code(60) is None
    log(5, "/a/re wards.py:12 exact")
    cause = child.blocking_code(60)
    assert child.new_blocking_code(60) == cause
    assert child.new_blocking_code(60) is None  # nothing was logged since
    assert (cause.file, cause.line) == ("/a/re wards.py", 12)
    assert cause.exception.startswith("exact blocks the event loop of score-0")


def test_a_stall_names_what_goes_on_for_longest():
    assert describe_longest([], 0.0) == ""
    slow = CompletionInFlight(index=2, turn=0, activity="tool", detail="look", since=100.0, engine="", versions=[])
    group = GroupInFlight(entry="1-0", prompt="d:0:3", claimed_at=90.0, worker="w-1", environment="maze")
    group.completions = [slow]
    assert describe_longest([group], 130.0) == "; d:0:3 of maze has been in tool look for 30 s (w-1)"
    assert describe_longest([GroupInFlight(entry="1-0", prompt="d:0:3", claimed_at=90.0, worker="w-1")], 130.0) == (
        "; d:0:3 has been in work for 40 s (w-1)"
    )
