"""Prompts rolled out and scored in this process, on an engine that is there, as the workers of a run would do it."""

from collections.abc import Sequence
from pathlib import Path

import anyio

from envs.factory import Factory
from stream.records import Group, Prompt
from workers.parts import load_factories, opened
from workers.rollout.chat.spoken import Spoken, load_spoken
from workers.rollout.engine.client import EngineClient
from workers.rollout.group import roll_out
from workers.rollout.led.endpoint import serving_for
from workers.rollout.slot_pool import SlotPool
from workers.score.worker import score_group
from workers.settings import Settings

AT_ONCE = 32
"""Groups, at most."""


async def play(
    settings: Settings, urls: Sequence[str], model: Path, prompts: Sequence[Prompt], *, at_least: int = 0
) -> list[Group]:
    """Roll out and score each prompt, in the prompts' order.

    Args:
        settings: of the run: environments, rewards, and the limits and temperature of `rollout`.
        urls: the engines, all of the same policy.
        model: the policy's folder, for tokenizer and template.
        prompts: what to complete, and how many times.
        at_least: oldest policy version that may sample; -1: any engine, numbered or not.

    Raises:
        EngineUnavailableError: no engine answers.
        DataError: a prompt cannot be rendered.
    """
    limits = settings.rollout
    factories, spoken = await anyio.to_thread.run_sync(_load, settings, model)
    groups: dict[int, Group] = {}
    room = anyio.CapacityLimiter(AT_ONCE)
    most = max((prompt.group_size for prompt in prompts), default=1)
    async with (
        EngineClient.of(settings, urls) as engine,
        SlotPool(factories, size=AT_ONCE * most) as pool,
        opened(settings, "rollout") as at_rollout,
        opened(settings, "score") as at_score,
        serving_for(factories, settings.rollout.endpoint_host) as endpoint,
    ):
        await engine.probe()

        async def one(place: int, prompt: Prompt) -> None:
            async with room:
                chat, tool_format = spoken[prompt.environment]
                group = await roll_out(
                    prompt,
                    chat=chat,
                    sampler=engine,
                    pool=pool,
                    limits=limits,
                    tool_format=tool_format,
                    rewards=at_rollout,
                    factories=factories,
                    at_least=at_least,
                    endpoint=endpoint,
                )
                await score_group(group, at_score, factories, limits.reward_timeout_s)
                groups[place] = group

        async with anyio.create_task_group() as tasks:
            for place, prompt in enumerate(prompts):
                tasks.start_soon(one, place, prompt)
    return [groups[place] for place in range(len(prompts))]


def _load(settings: Settings, model: Path) -> tuple[dict[str, Factory], dict[str | None, Spoken]]:
    factories = load_factories(settings)
    return factories, load_spoken(settings, model, factories)
