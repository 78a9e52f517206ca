"""How environments fail in other projects, row by row, and the test that covers each failure.

======================================================================  ================================================
failure elsewhere                                                       covered by
======================================================================  ================================================
a state dict cleared in place turned a snapshot's reward 1.0 into 0.0   `test_clearing_state_in_place...`
a copy of a client shares its socket and reads the next episode         `test_a_snapshot_of_a_client_never_has...`
a copy of a wrapper shares the inner environment                        `test_a_wrappers_inner_environment...`
snapshots taken too late, or without the class's `__copy__`             `test_trl_environments.py`, docstring
after a timeout the instance answers for the previous step              `test_an_instance_is_not_used_after_a_timeout`
the same after a cancelled call                                         `test_environment_slot.py`
async tools refused; sync tools run on the event loop                   `test_async_and_sync_tools_mix...`
tools without a deadline                                                `test_a_tool_that_never_returns...`
environments must be picklable                                          `test_an_environment_may_have_attributes...`
the result of `reset` was dropped                                       `test_the_result_of_reset_ends_the_prompt`
`exit()` in model-made code ends the worker                             `test_no_exception_of_a_tool...`
a tool error counts as a dead tool server, or the reverse               `test_a_tool_error_leaves_the_completion...`
resets wait for each other                                              `test_resets_run_concurrently`; measured by
                                                                        `benchmarks/slots.py`
1172 of 1280 rollouts failed in reset and were trained as reward 0      `test_a_failed_reset_leaves_the_completion...`
hung threads starve or outlive the worker                               `test_recycling.py`, `test_abandoned_threads.py`
======================================================================  ================================================

Tests of the adapters cover OpenEnv sockets, environment servers and MCP; tests of the `python` environment cover `exec`
sandboxes.
"""

import sys
import threading
import time
from collections import UserDict
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from envs.factory import EnvironmentFactory
from stream.errors import EnvironmentFailure
from stream.records import Failure
from stream.validity import RolloutReason, Unmeasured
from tests.unit.test_trl_environments import scored
from workers.check.scripted import call, play, scripted_chat
from workers.rollout.environment_pool import EnvironmentPool
from workers.settings import RolloutSettings


async def test_clearing_state_in_place_changes_no_snapshot():
    class Solved:
        def __init__(self):
            self.state = {}

        def reset(self, number, **row):
            self.state.clear()
            self.state["solved"] = number == 1

    rewards = await scored(Solved, lambda env: env.state["solved"])
    assert [reward.value for reward in rewards] == [1.0, 0.0]


class Server:
    """A remote service that holds one episode at a time."""

    episode = 0


class Client:
    def __init__(self):
        self.lock = threading.Lock()  # like a socket's

    def read(self):
        return Server.episode


async def test_a_snapshot_of_a_client_never_has_state_of_the_next_episode():
    class Remote:
        def __init__(self):
            self.client = Client()

        def reset(self, number, **row):
            Server.episode = number

        def score(self):
            """Return the server's answer."""
            with self.client.lock:
                return self.client.read()

    rewards = await scored(Remote, lambda env: env.score())
    assert all(isinstance(reward, Unmeasured) for reward in rewards)
    assert "lock" in rewards[0].detail  # named, and no number


async def test_a_wrappers_inner_environment_is_frozen_with_it():
    class Inner:
        def __init__(self):
            self.state = []

    class Wrapper:
        def __init__(self):
            self.env = Inner()

        def reset(self, number, **row):
            self.env.state[:] = [number]

    rewards = await scored(Wrapper, lambda wrapper: wrapper.env.state[0])
    assert [reward.value for reward in rewards] == [1.0, 2.0]


def test_an_instance_is_not_used_after_a_timeout():
    made = []

    class Late:
        def __init__(self):
            made.append(self)
            self.answers = 0

        def reset(self, **row): ...

        def step(self):
            """Step."""
            self.answers += 1
            time.sleep(0.3)
            return self.answers

    async def main():
        limits = RolloutSettings(call_timeout_s=0.05)
        async with EnvironmentPool({"late": EnvironmentFactory.from_callable(Late)}, size=1) as pool:
            seen = []
            for _ in range(2):
                async with pool.slot("late") as slot:
                    await slot.reset({}, 0, 0, 5.0)
                    seen.append(slot._environment)
                    result = await slot.call_tool(_call("step"), limits.call_timeout_s)
                    assert result.is_error
            assert seen[0] is not seen[1]

    anyio.run(main)
    assert len(made) == 3  # the sample instance, and one per episode


def _call(name, **arguments):
    from workers.rollout.tool_formats.parsing import ToolCall

    return ToolCall(name, arguments, "")


def test_async_and_sync_tools_mix_and_only_async_ones_run_on_the_loop():
    class Both:
        def reset(self, **row):
            self.threads = {"reset": threading.get_ident()}

        async def on_the_loop(self):
            """Async."""
            await anyio.lowlevel.checkpoint()
            self.threads["async"] = threading.get_ident()
            return "a"

        def in_a_thread(self):
            """Sync."""
            self.threads["sync"] = threading.get_ident()
            return "s"

    played = play(Both, [[call("on_the_loop"), call("in_a_thread"), call("on_the_loop")]])
    assert played.tool_replies == ["a", "s", "a"]
    threads = played.environment.threads
    assert threads["async"] not in (threads["sync"], threads["reset"])


def test_a_tool_that_never_returns_costs_only_its_own_deadline():
    class Stuck:
        def reset(self, **row): ...

        async def wait(self):
            """Wait."""
            await anyio.sleep_forever()

        def hang(self):
            """Hang."""
            threading.Event().wait(60)

        def get_reward(self):
            return 0.5

    played = play(Stuck, [call("wait"), call("hang"), "gave up"], limits=RolloutSettings(call_timeout_s=0.05))
    assert played.tool_replies == [f"Error: {name} did not answer within 0.05 s" for name in ("wait", "hang")]
    assert played.reward_value == 0.5


def test_an_environment_may_have_attributes_that_cannot_be_pickled():
    class Unpicklable:
        def __init__(self):
            self.lock, self.make = threading.Lock(), lambda: 1
            self.file = Path(__file__).open()  # noqa: SIM115
            self.numbers = (n for n in range(9))

        def reset(self, **row):
            self.kept = [1]

        def close(self):
            self.file.close()

        def get_reward(self):
            return float(self.make())

    played = play(Unpicklable, [])
    assert (played.reward_value, played.environment.kept) == (1.0, [1])
    for name in ("lock", "make", "file", "numbers"):
        with pytest.raises(AttributeError, match=name):
            getattr(played.environment, name)


@pytest.mark.parametrize(
    ("observation", "content"),
    [
        ("It is dark.", "Look.It is dark."),
        (None, "Look."),
        ([{"type": "text", "text": "It is dark."}], [{"type": "text", "text": t} for t in ("Look.", "It is dark.")]),
    ],
)
def test_the_result_of_reset_ends_the_prompt(observation, content):
    class Room:
        def reset(self, **row):
            return observation

    assert play(Room, ["ok"], prompt="Look.").messages[0] == {"role": "user", "content": content}


@pytest.mark.parametrize(
    "error",
    [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), MemoryError("x"), RecursionError("x"), StopIteration(1)],
)
def test_no_exception_of_a_tool_ends_the_worker(error):
    class Wild:
        def reset(self, **row): ...

        def act(self):
            """Act."""
            raise error

        async def wait(self):
            """Act, async."""
            raise error

        def get_reward(self):
            return 1.0

    played = play(Wild, [call("act"), call("wait"), "done"])
    assert all(reply.startswith("Error: ") for reply in played.tool_replies)
    assert type(error).__name__ in played.tool_replies[0]
    assert played.reward_value == 1.0


class Text(str):
    """As numpy, lxml, Beautiful Soup and MarkupSafe return."""

    __slots__ = ()


class Message(Exception):
    def __init__(self, text) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text() if callable(self.text) else self.text


def returns(value):
    return lambda: value


def raises(error):
    def fail():
        raise error

    return fail


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (returns(Text("text")), "text"),
        (returns("half \ud800"), "half ?"),
        (raises(Message(Text("text"))), "Error: Message: text"),
        (raises(Message("half \ud800")), "Error: Message: half ?"),
        (raises(Message(sys.exit)), "Error: Message: (its message cannot be read)"),
    ],
    ids=["text", "surrogate", "message", "message with a surrogate", "message that exits"],
)
def test_a_record_can_hold_whatever_a_tool_returns_or_raises(answer, text):
    class Tool:
        def reset(self):
            return Text("Go.")

        def look(self):
            """Look."""
            return answer()

        def get_reward(self):
            return {Text("a"): 1.0, "half \ud800": 2.0}

    played = play(Tool, [call("look"), "done"])
    assert played.tool_replies == [text]
    assert [part.name for part in played.parts] == ["env.a", "env.half ?"]
    msgspec.msgpack.encode(played.completion)


def test_an_environment_server_that_is_gone_with_half_a_character_in_its_message_is_a_failure_that_a_record_can_hold():
    class Gone:
        def look(self):
            """Look."""
            raise EnvironmentFailure("gone \ud800")

        def reset(self):
            return "Go."

    played = play(Gone, [call("look")])
    assert played.failure.reason is RolloutReason.ENV_STEP
    msgspec.msgpack.encode(played.completion)


def test_a_proxy_whose_server_is_gone_ends_its_own_episodes_only():
    class Proxy:
        is_gone = False

        def reset(self):
            self.is_gone = True
            return "Go."

        def look(self):
            """Look."""
            return "dark"

        def __getattr__(self, name):
            raise EOFError(f"{name}: connection closed") if self.is_gone else AttributeError(name)

    played = play(Proxy, [call("look"), "done"])
    assert played.failure.reason is RolloutReason.ENV_STEP
    assert "done: connection closed" in played.failure.detail
    assert isinstance(play(Proxy, ["done"]).parts, list)


class Unreadable(UserDict):
    def items(self):
        raise RuntimeError("no items")


class Endless(list):
    def __len__(self):
        raise RuntimeError("no length")


@pytest.mark.parametrize("value", [Unreadable(a=1), Endless([1.0])])
def test_a_reward_that_cannot_be_read_is_unmeasured(value):
    class Rewarding:
        def reset(self):
            return "Go."

        def get_reward(self):
            return value

    assert "which raised RuntimeError: no " in play(Rewarding, ["done"]).reward.detail


def test_a_tool_error_leaves_the_completion_valid_and_a_dead_tool_server_does_not():
    class Shop:
        def reset(self, **row): ...

        def buy(self, what: str):
            """Buy.

            Args:
                what: To buy.
            """
            if what == "server":
                raise EnvironmentFailure("the shop is gone")
            raise ValueError(f"there is no {what}")

        def get_reward(self):
            return 0.0

    refused = play(Shop, [call("buy", what="tea"), "no tea"])
    assert refused.tool_replies == ["Error: ValueError: there is no tea"]
    assert (refused.is_valid, refused.reward_value) == (True, 0.0)
    dead = play(Shop, [call("buy", what="server"), "no tea"])
    assert dead.failure.reason is RolloutReason.ENV_STEP
    assert "the shop is gone" in dead.failure.detail
    assert (dead.is_valid, dead.reward, dead.completion.parts) == (False, None, [])


def test_a_failed_reset_leaves_the_completion_without_reward():
    class Down:
        def reset(self, **row):
            raise ConnectionError("refused")

        def get_reward(self):
            return 0.0

    played = play(Down, ["hello"])
    assert played.failure.reason is RolloutReason.ENV_RESET
    assert (played.reward, played.completion.parts, played.environment) == (None, [], None)


async def test_resets_run_concurrently():
    """Resets must overlap: the barrier opens only when all 16 have arrived."""
    scripted_chat()
    together = threading.Barrier(16)

    class Slow:
        def reset(self, **row):
            together.wait(30)

    async with (
        EnvironmentPool({"slow": EnvironmentFactory.from_callable(Slow)}, size=16) as pool,
        anyio.create_task_group() as tasks,
    ):

        async def episode():
            async with pool.slot("slow") as slot:
                assert not isinstance(await slot.reset({}, 0, 0, 30.0), Failure)

        for _ in range(16):
            tasks.start_soon(episode)
