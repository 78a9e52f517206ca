"""Sample and score prompts in this process on existing engines, as the workers of a run do."""

from collections.abc import Sequence
from pathlib import Path

import anyio

from envs.factory import EnvironmentFactory
from stream.records import Group, Prompt
from workers.role.concurrency import ConcurrencyLimit
from workers.role.rewards import load_factories, open_reward_functions
from workers.rollout.chat.chat_setup import ChatSetup, load_chat_setups
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.group import open_group_runner
from workers.score.worker import score_group
from workers.settings import Settings

MAX_GROUPS_IN_FLIGHT = 32
"""Largest number of groups sampled concurrently."""


async def roll_out_and_score(
    settings: Settings, urls: Sequence[str], model: Path, prompts: Sequence[Prompt], *, min_policy_version: int = 0
) -> list[Group]:
    """Sample and score a group for each prompt. Returns the groups in the order of the prompts.

    Args:
        settings: environments, rewards, and the limits and temperature of `[rollout]`.
        urls: URLs of engines that serve the same policy.
        model: folder of the policy, for tokenizer and chat template.
        prompts: prompts, each with its group size.
        min_policy_version: oldest policy version that may sample; -1: any engine, with or without a version.

    Raises:
        EngineUnavailableError: no engine answers.
        DataError: a prompt cannot be rendered.
    """
    factories, chats = await anyio.to_thread.run_sync(_load, settings, model)
    groups: dict[int, Group] = {}
    limit = ConcurrencyLimit(MAX_GROUPS_IN_FLIGHT)
    max_episodes = MAX_GROUPS_IN_FLIGHT * max((prompt.group_size for prompt in prompts), default=1)
    async with (
        EngineClient.from_settings(settings, urls) as engine,
        open_group_runner(settings, factories, chats, engine, max_episodes=max_episodes) as runner,
        open_reward_functions(settings, "score") as rewards,
    ):
        await engine.wait_until_ready()

        async def run_prompt(index: int, prompt: Prompt) -> None:
            group = await runner.run(prompt, min_policy_version=min_policy_version)
            await score_group(group, rewards, factories, settings.rollout.call_timeout_s)
            groups[index] = group
            limit.release()

        async with anyio.create_task_group() as tasks:
            for index, prompt in enumerate(prompts):
                await limit.wait_available()
                limit.acquire()
                tasks.start_soon(run_prompt, index, prompt)
    return [groups[index] for index in range(len(prompts))]


def _load(settings: Settings, model: Path) -> tuple[dict[str, EnvironmentFactory], dict[str | None, ChatSetup]]:
    factories = load_factories(settings)
    return factories, load_chat_setups(settings, model, factories)
