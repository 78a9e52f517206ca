import dataclasses
import sys
import threading
import time

import anyio
import anyio.lowlevel
import pytest

from envs.call import CallRunner
from envs.factory import EnvironmentFactory
from envs.references import Reference
from envs.snapshot import thaw
from stream.errors import DataError, EnvironmentFailure
from stream.records import Failure
from stream.validity import Measured, RewardReason, RolloutReason, Unmeasured
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.tool_formats.parsing import ToolCall
from workers.rollout.tool_result import ToolResult, to_text


def factory_of(cls):
    return EnvironmentFactory(Reference("test", "module", cls, sys.modules[cls.__module__]), cls, cls())


def slot_of(cls, threads=4):
    return EnvironmentSlot("env", factory_of(cls), CallRunner(anyio.CapacityLimiter(threads)))


def call(name, **arguments):
    return ToolCall(name, arguments, "")


class Counter:
    """Logs its calls."""

    def __init__(self):
        self.closed = threading.Event()
        self.log = []
        self.row = None

    def reset(self, **row):
        self.row = row
        self.log = []

    def add(self, a: int, b: int) -> int:
        self.log.append(("add", threading.get_ident()))
        return a + b

    async def wait(self, seconds: float) -> str:
        await anyio.sleep(seconds)
        self.log.append(("wait", threading.get_ident()))
        return "waited"

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        self.log.append(("sleep", seconds))
        return "slept"

    def fail(self, kind: str) -> str:
        if kind == "world":
            raise EnvironmentFailure("the server is gone")
        if kind == "group":
            raise ExceptionGroup("tasks", [ValueError("x"), EnvironmentFailure("the server is gone")])
        if kind == "exit":
            raise SystemExit(3)
        raise ValueError("half of \ud800 a character " + "x" * 5000)

    def close(self):
        self.closed.set()


async def test_reset_passes_fields_seed_and_index_and_returns_the_observation():
    slot = slot_of(Counter)
    assert await slot.reset({"answer": "4"}, seed=11, index=3, timeout_s=5) is None
    assert slot._environment.row == {"answer": "4", "seed": 11, "completion_seed": 14, "completion_index": 3}


@pytest.mark.parametrize(
    "observation",
    [
        *("Hello", "", None, [{"type": "text", "text": "Hello"}], [], "half a \ud800 character"),
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        [{"role": "assistant", "tool_calls": [{}], "content": None}, {"role": "tool", "content": "4"}],
    ],
)
async def test_an_observation_is_none_text_parts_or_messages(observation):
    class Observing:
        async def reset(self):
            return observation

    result = await slot_of(Observing).reset({}, 0, 0, 5)
    assert result == (observation.replace("\ud800", "?") if isinstance(observation, str) else observation)


@pytest.mark.parametrize(
    "observation",
    [
        *(7, {"text": "Hello"}, ["Hello"], [{"image": object()}], b"Hello", [{"content": "Hello"}]),
        [{"role": "user", "content": "Hello"}, {"type": "text", "text": "Hello"}],
        *([{"role": "user"}], [{"role": 1, "content": "Hello"}], [{"role": "user", "content": ["Hello"]}]),
    ],
)
async def test_an_observation_that_cannot_end_a_prompt_fails_the_reset(observation):
    class Observing:
        def reset(self):
            return observation

    slot = slot_of(Observing)
    failure = await slot.reset({}, 0, 0, 5)
    assert failure.reason is RolloutReason.ENV_RESET
    assert "None, a string, a list of content parts, or a list of messages with roles is expected" in failure.detail
    assert slot.needs_replacement


async def test_a_sync_tool_runs_in_a_thread_and_an_async_one_on_the_loop():
    slot = slot_of(Counter)
    await slot.reset({}, 0, 0, 5)
    assert await slot.call_tool(call("add", a=1, b=2), 5) == ToolResult("3")
    assert await slot.call_tool(call("wait", seconds=0), 5) == ToolResult("waited")
    (_, adding), (_, waiting) = slot._environment.log
    assert adding != threading.get_ident()
    assert waiting == threading.get_ident()


async def test_a_sync_tool_that_returns_an_awaitable_is_awaited():
    class Wrapped:
        def reset(self):
            pass

        def look(self) -> object:
            """Look."""

            async def later():
                await anyio.lowlevel.checkpoint()
                return {"seen": 1}

            return later()

    slot = slot_of(Wrapped)
    await slot.reset({}, 0, 0, 5)
    assert await slot.call_tool(call("look"), 5) == ToolResult('{"seen":1}')


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("subtract", {}, "Error: there is no tool 'subtract'; the tools are: add, fail, sleep, wait"),
        ("reset", {}, "Error: there is no tool 'reset'"),
        ("close", {}, "Error: there is no tool 'close'"),
        ("__init__", {}, "Error: there is no tool '__init__'"),
        ("add", {"a": 1}, "Error: add: b is missing"),
        ("add", {"a": 1, "b": "two"}, "Error: add: b: expected `int`"),
        ("fail", {"kind": "exit"}, "Error: SystemExit: 3"),
        ("fail", {"kind": "other"}, "Error: ValueError: half of ? a character xxx"),
    ],
)
async def test_a_failed_call_is_text_for_the_model_and_keeps_the_slot(name, arguments, text):
    slot = slot_of(Counter)
    await slot.reset({}, 0, 0, 5)
    result = await slot.call_tool(call(name, **arguments), 5)
    assert result.is_error
    assert result.text.startswith(text)
    assert len(result.text) < 2100
    assert not slot.needs_replacement


@pytest.mark.parametrize("kind", ["world", "group"])
async def test_an_environment_failure_in_a_tool_fails_the_episode_and_replaces_the_instance(kind):
    slot = slot_of(Counter)
    await slot.reset({}, 0, 0, 5)
    failure = await slot.call_tool(call("fail", kind=kind), 5)
    assert isinstance(failure, Failure)
    assert failure.reason is RolloutReason.ENV_STEP
    assert slot.needs_replacement


@pytest.mark.parametrize("tool", ["sleep", "wait"])
async def test_a_tool_that_times_out_is_text_for_the_model_and_replaces_the_instance(tool):
    slot = slot_of(Counter)
    await slot.reset({}, 0, 0, 5)
    environment = slot._environment
    result = await slot.call_tool(call(tool, seconds=3.0), 0.05)
    assert environment.log == [], "the tool is still running"
    assert result == ToolResult(f"Error: {tool} did not answer within 0.05 s", is_error=True)
    assert slot.needs_replacement


async def test_waiting_for_a_thread_does_not_count_towards_a_tools_timeout():
    slots = [slot_of(Counter)]
    slots += [EnvironmentSlot("env", slots[0].factory, slots[0]._calls) for _ in range(3)]
    slots[0]._calls._limiter.total_tokens = 1
    for slot in slots:
        await slot.reset({}, 0, 0, 5)
    results = []

    async def one(slot):
        results.append(await slot.call_tool(call("sleep", seconds=0.3), 1.0))

    async with anyio.create_task_group() as tasks:
        for slot in slots:
            tasks.start_soon(one, slot)
    assert results == [ToolResult("slept")] * 4


async def test_sync_tools_of_one_environment_take_turns_in_the_order_of_their_calls():
    slot = slot_of(Counter)
    await slot.reset({}, 0, 0, 5)
    results = await slot.call_tools([call("sleep", seconds=seconds) for seconds in (0.06, 0.03, 0.0)], 5)
    assert [result.seconds >= 0.03 for result in results] == [True, True, False]
    assert slot._environment.log == [("sleep", 0.06), ("sleep", 0.03), ("sleep", 0.0)]


async def test_a_reset_that_raises_or_times_out_fails_and_the_next_one_gets_a_new_instance():
    class Moody:
        made = 0

        def __init__(self):
            type(self).made += 1
            self.nth = type(self).made

        def reset(self, how):
            if how == "raise":
                raise RuntimeError("no server")
            if how == "hang":
                time.sleep(1.0)

    pool = EnvironmentPool({"env": factory_of(Moody)}, size=1)
    async with pool:
        for how, message in (("raise", "RuntimeError: no server"), ("hang", "did not return within 0.3 s")):
            async with pool.slot("env") as slot:
                failure = await slot.reset({"how": how}, 0, 0, 0.3)
                assert failure == Failure(reason=RolloutReason.ENV_RESET, detail=failure.detail, cause=failure.cause)
                assert message in failure.detail
        async with pool.slot("env") as slot:
            assert await slot.reset({"how": "well"}, 0, 0, 5) is None
            assert slot._environment.nth == 4  # the factory's sample instance, and one per episode


async def test_an_environment_that_cannot_be_created_fails_the_reset():
    class Broken:
        broken = False

        def __init__(self):
            if type(self).broken:
                raise OSError("no disk")

        def reset(self):
            pass

    slot = slot_of(Broken)
    Broken.broken = True
    failure = await slot.reset({}, 0, 0, 5)
    assert failure.reason is RolloutReason.ENV_RESET
    assert "no disk" in failure.detail


async def test_a_slot_is_reused_and_its_environment_with_it():
    async with EnvironmentPool({"env": factory_of(Counter)}, size=2) as pool:
        async with pool.slot("env") as slot:
            await slot.reset({}, 0, 0, 5)
            first = slot._environment
        async with pool.slot("env") as slot:
            await slot.reset({}, 0, 0, 5)
            assert slot._environment is first
    assert first.closed.is_set()


async def test_a_pool_never_has_more_slots_than_its_size():
    async with EnvironmentPool({"env": factory_of(Counter)}, size=2) as pool:
        held, most = 0, 0

        async def episode():
            nonlocal held, most
            async with pool.slot("env"):
                held += 1
                most = max(most, held)
                await anyio.sleep(0.01)
                held -= 1

        async with anyio.create_task_group() as tasks:
            for _ in range(7):
                tasks.start_soon(episode)
        assert most == 2


async def test_each_environment_has_its_own_slots_and_prompts_without_one_have_none():
    class Other(Counter):
        pass

    async with EnvironmentPool({"a": factory_of(Counter), "b": factory_of(Other)}, size=1) as pool:
        async with pool.slot("a") as a, pool.slot("b") as b, pool.slot(None) as none:
            await b.reset({}, 0, 0, 5)
            assert isinstance(b._environment, Other)
            assert (a.name, b.name, none) == ("a", "b", None)
        with pytest.raises(DataError, match="no environment is called 'c'; there are: a, b"):
            await pool.acquire("c")


async def test_a_cancelled_call_replaces_the_instance_since_its_thread_may_still_use_it():
    async with EnvironmentPool({"env": factory_of(Counter)}, size=1) as pool:
        with anyio.CancelScope() as scope:
            async with pool.slot("env") as slot:
                await slot.reset({}, 0, 0, 5)
                environment = slot._environment
                scope.deadline = anyio.current_time() + 0.05
                await slot.call_tool(call("sleep", seconds=0.3), 5)
        assert slot.needs_replacement
        async with pool.slot("env") as after:
            await after.reset({}, 0, 0, 5)
            assert after._environment is not environment
    assert environment.closed.is_set()


async def test_a_close_that_hangs_delays_nothing(monkeypatch):
    monkeypatch.setattr("workers.rollout.environment_slot._CLOSE_TIMEOUT_S", 0.5)

    class Hanging:
        hangs = False
        cancelled = 0

        def reset(self, fail=False):
            if fail:
                raise RuntimeError

        async def close(self):
            if type(self).hangs:
                try:
                    await anyio.sleep(60)
                finally:
                    type(self).cancelled += 1

    factory = factory_of(Hanging)
    Hanging.hangs = True
    async with EnvironmentPool({"env": factory}, size=1) as pool:
        async with pool.slot("env") as slot:
            await slot.reset({"fail": True}, 0, 0, 5)
        async with pool.slot("env") as slot:
            assert Hanging.cancelled == 0, "the first instance is still closing"
            assert await slot.reset({}, 0, 0, 5) is None
    assert Hanging.cancelled == 2, "the pool cancelled both after the timeout"


async def test_an_unmeasured_reward_replaces_the_instance():
    class Graded:
        def reset(self, grade):
            self.grade = grade

        def get_reward(self):
            return 1 / self.grade

    slot = slot_of(Graded)
    await slot.reset({"grade": 2}, 0, 0, 5)
    (part,) = await slot.reward(5)
    assert (part.name, part.reward, slot.needs_replacement) == ("env", Measured(0.5), False)
    await slot.reset({"grade": 0}, 0, 0, 5)
    (part,) = await slot.reward(5)
    assert isinstance(part.reward, Unmeasured)
    assert part.reward.reason is RewardReason.RAISED
    assert slot.needs_replacement


async def test_a_wrong_number_of_turn_rewards_replaces_the_instance():
    class Graded:
        def reset(self, grades):
            self.grades = grades

        def get_reward(self):
            return self.grades

    messages = [{"role": "assistant"}, {"role": "tool"}, {"role": "assistant"}]
    slot = slot_of(Graded)
    await slot.reset({"grades": [0.5, 1]}, 0, 0, 5)
    parts = await slot.reward(5, messages)
    assert [(part.turn, part.reward, slot.needs_replacement) for part in parts] == [
        (0, Measured(0.5), False),
        (1, Measured(1.0), False),
    ]
    await slot.reset({"grades": [0.5, 1, 0]}, 0, 0, 5)
    (part,) = await slot.reward(5, messages)
    assert part.reward.reason is RewardReason.SHAPE
    assert slot.needs_replacement


async def test_a_snapshot_does_not_change_after_it_was_taken():
    slot = slot_of(Counter)
    await slot.reset({"answer": "4"}, 0, 0, 5)
    await slot.call_tool(call("sleep", seconds=0), 5)
    frozen = await slot.freeze(100_000, 5)
    await slot.reset({"answer": "5"}, 0, 0, 5)
    seen = thaw(frozen, slot.factory)
    assert isinstance(seen, Counter)
    assert (seen.row["answer"], list(map(tuple, seen.log))) == ("4", [("sleep", 0)])


async def test_a_snapshot_that_cannot_be_taken_fails_the_completion():
    class Uncopied:
        def reset(self):
            pass

        def __copy__(self):
            raise OSError("no")

    slot = slot_of(Uncopied)
    await slot.reset({}, 0, 0, 5)
    failure = await slot.freeze(1000, 5)
    assert failure.reason is RolloutReason.ENV_STEP
    assert "taking its snapshot" in failure.detail


@dataclasses.dataclass
class Point:
    x: int


class Shouting:
    def __str__(self):
        return "LOUD"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (3, "3"),
        (None, "null"),
        (True, "true"),
        (2**80, str(2**80)),
        (float("nan"), "nan"),
        ({"a": [1, 2.5]}, '{"a":[1,2.5]}'),
        (Point(3), '{"x":3}'),
        (Shouting(), "LOUD"),
        ("half a \ud800 character", "half a ? character"),
        ({"half\udc80": ["\ud800", ("a",)]}, '{"half?":["?",["a"]]}'),
    ],
)
def test_a_tools_result_becomes_text(value, text):
    assert to_text(value) == text


async def test_an_error_leaves_the_pool_unwrapped_and_environments_are_closed():
    used = []

    async def work():
        async with EnvironmentPool({"env": factory_of(Counter)}, size=1) as pool:
            async with pool.slot("env") as slot:
                await slot.reset({}, 0, 0, 5)
                used.append(slot._environment)
            raise DataError("bad row")

    with pytest.raises(DataError, match="bad row"):
        await work()
    assert used[0].closed.is_set()


async def test_a_pool_whose_worker_is_cancelled_still_closes_its_environments():
    with anyio.move_on_after(0.1) as scope:
        async with EnvironmentPool({"env": factory_of(Counter)}, size=1) as pool:
            async with pool.slot("env") as slot:
                await slot.reset({}, 0, 0, 5)
                environment = slot._environment
            await anyio.sleep(60)
    assert scope.cancelled_caught
    assert environment.closed.is_set()


class Patient:
    """States its own deadlines."""

    timeouts_s = {"work": 5.0, "get_reward": 5.0}  # noqa: RUF012  (as a user writes it)
    episode_timeout_s = 0.2

    def reset(self, nap_s=0.0):
        time.sleep(nap_s)

    def work(self) -> str:
        time.sleep(0.2)
        return "done"

    def other(self) -> str:
        time.sleep(0.5)
        return "done"

    def get_reward(self) -> float:
        time.sleep(0.2)
        return 1.0


async def test_an_environment_states_its_own_deadlines():
    slot = slot_of(Patient, 4)
    assert await slot.reset({}, 0, 0, 0.1) is None
    assert (await slot.call_tool(call("work"), 0.1)).text == "done"
    assert slot.episode_timeout_s == 0.2
    assert [part.reward for part in await slot.reward(0.1)] == [Measured(1.0)]
    assert "did not answer within 0.1 s" in (await slot.call_tool(call("other"), 0.1)).text
    assert (await slot_of(Patient).reset({"nap_s": 0.4}, 0, 0, 0.1)).reason is RolloutReason.ENV_RESET
