"""How environments fail in other projects, row by row, and the test that covers each failure.

======================================================================  ================================================
failure elsewhere                                                       covered by, here or in the named file
======================================================================  ================================================
a state dict cleared in place turned a snapshot's reward 1.0 into 0.0   `test_trl_environments.py`
a copy of a client shares its socket and reads the next episode         `test_a_snapshot_of_a_client_never_has...`
a copy of a wrapper shares the inner environment                        `test_trl_environments.py`
snapshots taken too late, or without the class's `__copy__`             `test_trl_environments.py`, docstring
after a timeout or a cancelled call it answers for the previous step    `test_environment_slot.py`
async tools refused; sync tools run on the event loop                   `test_environment_slot.py`
tools without a deadline                                                `test_environment_slot.py`
environments must be picklable                                          `test_snapshot.py`
the result of `reset` was dropped                                       `test_episode.py`
`exit()` in model-made code ends the worker                             `test_no_exception_of_a_tool...`
a tool error counts as a dead tool server, or the reverse               `test_environment_slot.py`
resets wait for each other                                              `test_episode.py`; measured by
                                                                        `benchmarks/slots.py`
1172 of 1280 rollouts failed in reset and were trained as reward 0      `test_a_failed_reset_leaves_the_completion...`
hung threads starve or outlive the worker                               `test_recycling.py`, `test_abandoned_threads.py`
======================================================================  ================================================

Tests of the adapters cover OpenEnv sockets, environment servers and MCP; tests of the `python` environment cover `exec`
sandboxes.
"""

import sys
import threading
from collections import UserDict

import msgspec
import pytest

from stream.errors import EnvironmentFailure
from stream.validity import RolloutReason, Unmeasured
from tests.unit.test_trl_environments import scored
from workers.check.scripted import call, play


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


def test_a_failed_reset_leaves_the_completion_without_reward():
    class Down:
        def reset(self, **row):
            raise ConnectionError("refused")

        def get_reward(self):
            return 0.0

    played = play(Down, ["hello"])
    assert played.failure.reason is RolloutReason.ENV_RESET
    assert (played.reward, played.completion.parts, played.environment) == (None, [], None)
