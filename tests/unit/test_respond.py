"""Environments that answer a turn, or end the episode."""

import time

import pytest

from envs.contract import is_done, is_response
from envs.factory import EnvironmentFactory
from stream.errors import EnvironmentFailure
from stream.validity import RolloutReason, TruncationReason
from workers.check.scripted import call, play
from workers.settings import RolloutSettings


class Shop:
    """A customer who asks for a cheaper price; offers are made with a tool."""

    def reset(self, limit=3, **row):
        self.limit, self.heard, self.offers = limit, [], []
        return "I want a lamp."

    def offer(self, price: int) -> str:
        """Offer a price."""
        self.offers.append(price)
        return "noted"

    async def respond(self, message, messages):
        self.heard.append((message, len(messages)))
        messages.clear()  # a copy
        return None if len(self.heard) == self.limit else [{"type": "text", "text": f"Cheaper, {message}"}]

    def get_reward(self, messages):
        return [float(m["role"] == "assistant") for m in messages if m["role"] == "assistant"]


def test_a_turn_without_a_tool_call_is_answered_until_the_environment_returns_none():
    played = play(Shop, ["10?", call("offer", price=9), "9!", "8!", "unused"])
    roles = ["user", "assistant", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [m["role"] for m in played.messages] == roles
    assert played.messages[2]["content"] == [{"type": "text", "text": "Cheaper, 10?"}]
    assert played.environment.heard == [("10?", 1), ("9!", 5), ("8!", 7)]
    assert (played.truncated, played.failure, played.unused_turns) == (None, None, ["unused"])
    assert (played.completion.turns, played.reward_value) == (4, 4.0)
    assert [tool.name for tool in played.tools] == ["offer"]


def test_an_answered_episode_has_the_limits_of_every_other():
    assert play(Shop, ["a", "b"], fields={"limit": 9}).truncated is TruncationReason.MAX_TURNS
    cut = play(Shop, ["a" * 100] * 9, fields={"limit": 9}, limits=RolloutSettings(max_tokens=300))
    assert (cut.truncated, cut.completion.turns, cut.is_valid) == (TruncationReason.LENGTH, 2, True)


class Broken:
    def reset(self, how, **row):
        self.how = how

    def respond(self, text):
        if self.how == "raise":
            raise ValueError("no more")
        if self.how == "failure":
            raise EnvironmentFailure("the server is gone")
        if self.how == "hang":
            time.sleep(5)
        return {"number": 5, "empty": [], "assistant": [{"role": "assistant", "content": "me"}], "object": [object()]}[
            self.how
        ]


@pytest.mark.parametrize(
    ("how", "reason", "detail"),
    [
        ("raise", RolloutReason.ENV_STEP, "played: respond: ValueError: no more"),
        ("failure", RolloutReason.ENV_STEP, "EnvironmentFailure: the server is gone"),
        ("hang", RolloutReason.ENV_TIMEOUT, "played: respond: it did not return within 0.2 s"),
        ("number", RolloutReason.ENV_STEP, "int returned; None, a string,"),
        ("empty", RolloutReason.ENV_STEP, "list returned"),
        ("assistant", RolloutReason.ENV_STEP, "roles other than assistant and tool"),
        ("object", RolloutReason.ENV_STEP, "list returned"),
    ],
)
def test_a_response_that_fails_makes_the_completion_invalid(how, reason, detail):
    limits = RolloutSettings(call_timeout_s=0.2) if how == "hang" else None
    played = play(Broken, ["hello", "again"], fields={"how": how}, limits=limits)
    assert played.failure.reason is reason
    assert detail in played.failure.detail


class Door:
    """Ends the episode when it is opened."""

    def reset(self, **row):
        self.done = False

    def push(self, strength: int) -> str:
        """Push the door."""
        self.done = strength > 1
        return "open" if self.done else "shut"


class Lock(Door):
    def reset(self, kind=None, **row):
        self.kind, self.opened = kind, False

    @property
    def done(self):
        if self.kind == "raise":
            raise ValueError("jammed")
        return self.opened

    def push(self, strength: int) -> str:
        """Push the door."""
        self.opened = strength > 1
        return "shut"

    def respond(self, message):
        self.opened = True
        return "It opens by itself."


@pytest.mark.parametrize("env", [Door, Lock])
def test_a_tool_ends_the_episode_by_setting_done(env):
    played = play(env, [call("push", strength=1), call("push", strength=2), "unused"])
    assert (len(played.tool_replies), played.unused_turns) == (2, ["unused"])
    assert (played.truncated, played.failure) == (None, None)
    assert played.messages[-1]["role"] == "tool"


def test_a_response_ends_the_episode_by_setting_done():
    played = play(Lock, ["Sesame", "unused"])
    assert (played.messages[-1]["content"], played.unused_turns) == ("It opens by itself.", ["unused"])


def test_a_property_done_that_raises_makes_the_completion_invalid():
    played = play(Lock, [call("push", strength=1)], fields={"kind": "raise"})
    assert (played.failure.reason, "done: ValueError: jammed" in played.failure.detail) == (
        RolloutReason.ENV_STEP,
        True,
    )


def test_only_a_true_value_is_done_and_a_method_is_a_tool():
    class Item:
        def reset(self): ...

        def done(self) -> str:
            """Say so."""
            return "ok"

    assert [tool.name for tool in EnvironmentFactory.from_callable(Item).tools] == ["done"]
    assert not is_done(Item())
    for value, expected in ((True, True), (1, False), (["x"], False), (None, False)):
        env = Door()
        env.done = value
        assert is_done(env) is expected


def test_what_a_response_may_be():
    good = [None, "", "text", [{"type": "text", "text": "a"}], [{"role": "user", "content": "a"}]]
    assert all(map(is_response, good))
    bad = [[], 1, {}, [{"role": "tool", "content": "a"}], [{"role": "user", "tool_calls": [1]}]]
    assert not any(map(is_response, bad))
