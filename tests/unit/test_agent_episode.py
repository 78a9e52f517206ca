"""Episodes of environments that run their own loop: whether the policy or the environment caused the end."""

import aiohttp
import pytest

from envs.contract import AgentEnvironment
from envs.factory import EnvironmentFactory
from envs.rewards import merge_parts
from stream.validity import Measured, RolloutReason, TruncationReason
from tests.adapters.episodes import completions


class Stubborn(AgentEnvironment):
    """Requests turns until a request is refused, then raises."""

    def reset(self, turns):
        self.turns, self.said = turns, 0

    async def run_episode(self, endpoint, sampling):
        messages = [{"role": "user", "content": "Count."}]
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            for _ in range(self.turns):
                async with session.post(f"{endpoint}/chat/completions", json={"messages": messages}) as answer:
                    reply = (await answer.json())["choices"][0]["message"]
                self.said += 1
                messages = [*messages, reply, {"role": "user", "content": "Go on."}]
        if self.turns == 0:
            raise ConnectionError("the world is gone")

    def get_reward(self):
        return float(self.said)


@pytest.mark.parametrize(
    ("turns", "truncated", "failed"),
    [(2, None, None), (20, TruncationReason.MAX_TURNS, None), (0, None, RolloutReason.ENV_STEP)],
)
async def test_an_agent_that_fails_after_a_limit_is_truncated_and_not_failed(turns, truncated, failed):
    (completion,) = await completions(
        EnvironmentFactory.from_callable(Stubborn), ["one"] * 30, fields={"turns": turns}, max_turns=3
    )
    assert completion.truncated is truncated
    assert (completion.failure.reason if completion.failure else None) is failed
    if failed is None:
        assert isinstance(merge_parts(completion.parts), Measured)
