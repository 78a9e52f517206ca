"""`play`: an episode without a model, through the rollout worker's code."""

import os
import signal
import time

import anyio
import pytest

from envs.builtin.calculator import exact_answer
from envs.builtin.guess import Guess
from stream.errors import EnvironmentFailure
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from stream.waiting import run_in_daemon_thread
from workers.check.scripted import call, play
from workers.settings import RolloutSettings


def test_an_episode_is_played_and_its_result_is_returned():
    played = play(Guess, [call("guess", number=50), call("guess", number=7), "It is 7."], fields={"secret": 7})
    assert played.tool_replies == ["lower", "correct"]
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in played.messages] == roles
    assert played.messages[0]["content"] == "I am thinking of a whole number from 1 to 100. Guess it."
    assert played.messages[-1]["content"] == "It is 7."
    assert (played.reward_value, played.is_valid, played.failure, played.truncated) == (1.0, True, None, None)
    assert isinstance(played.environment, Guess)
    assert played.environment.guesses == [50, 7]
    assert played.snapshot_bytes > 0
    assert played.unused_turns == []
    assert [tool.name for tool in played.tools] == ["guess"]


def test_a_reference_is_played_with_reward_functions_and_a_prompt():
    turns = [[call("multiply", a=97, b=7), call("add", a=1, b="one")], call("subtract", a=679, b=46), "Answer: 633"]
    prompt = "Start with 97, times 7, then minus 46."
    played = play(
        "calculator", turns, prompt=prompt, fields={"answer": 633}, rewards=["calculator_answer", exact_answer]
    )
    assert played.tool_replies == ["679", "Error: add: b: expected `int`, got `str`", "633"]
    assert [(part.name, part.reward) for part in played.parts] == [
        ("calculator_answer", Measured(1.0)),
        ("exact_answer", Measured(1.0)),
    ]


def test_the_model_reads_errors_of_malformed_calls_as_in_a_run():
    played = play(Guess, ["<tool_call>{guess 7}</tool_call>", call("shout")], fields={"secret": 7})
    assert "could not be read" in played.tool_replies[0]
    assert "there is no tool 'shout'; the tools are: guess" in played.tool_replies[1]
    assert played.reward_value == 0.0


def test_limits_end_the_episode_as_in_a_run_and_unused_turns_are_reported():
    turns = [call("guess", number=1)] * 3
    played = play(Guess, turns, fields={"secret": 7}, limits=RolloutSettings(max_turns=2))
    assert played.truncated is TruncationReason.MAX_TURNS
    assert len(played.unused_turns) == 1
    assert play(Guess, ["x" * 700], limits=RolloutSettings()).truncated is TruncationReason.LENGTH


class Sick:
    def reset(self, how, **row):
        self.how = how
        if how == "reset":
            raise ValueError("no")

    def act(self):
        """Act."""
        if self.how == "world":
            raise EnvironmentFailure("the server is gone")
        if self.how == "hang":
            time.sleep(60)

    def get_reward(self):
        return None if self.how == "nothing" else 1.0


@pytest.mark.parametrize(("how", "reason"), [("reset", RolloutReason.ENV_RESET), ("world", RolloutReason.ENV_STEP)])
def test_a_failing_environment_leaves_no_reward(how, reason):
    played = play(Sick, [call("act")], fields={"how": how})
    assert (played.failure.reason, played.reward, played.is_valid, played.environment) == (reason, None, False, None)
    with pytest.raises(ValueError, match=f"no reward: {reason.value}"):
        _ = played.reward_value


def test_reading_the_value_of_an_unmeasured_reward_raises():
    played = play(Sick, [call("act")], fields={"how": "nothing"})
    assert isinstance(played.reward, Unmeasured)
    assert played.reward.reason is RewardReason.MISSING
    with pytest.raises(ValueError, match="no reward: missing"):
        _ = played.reward_value


def test_a_hanging_tool_ends_at_its_deadline():
    played = play(Sick, [call("act"), "done"], fields={"how": "hang"}, limits=RolloutSettings(call_timeout_s=0.05))
    assert played.tool_replies == ["Error: act did not answer within 0.05 s"]
    assert played.reward_value == 1.0


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt, also where the tests were started in the background of a shell, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_what_was_begun_and_is_raised():
    ended = []

    async def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_in_daemon_thread(interrupted)
    assert ended == [True]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_what_is_raised_on_the_other_event_loop_reaches_the_caller(error):
    async def failing():
        raise error

    with pytest.raises(type(error), match=str(error)):
        run_in_daemon_thread(failing)
