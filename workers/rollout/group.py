"""All completions of one prompt, at the same time."""

from collections.abc import Mapping, Sequence

import anyio

from envs.factory import Factory
from envs.rewards import RewardFunction
from stream.errors import PenstockError
from stream.records import Completion, Group, Prompt
from workers.parts import add_parts
from workers.rollout.chat import Chat
from workers.rollout.episode import Sampler, play
from workers.rollout.slot import SlotPool
from workers.rollout.tool_format import ToolFormat
from workers.settings import Rollout


async def roll_out(
    prompt: Prompt,
    *,
    chat: Chat,
    sampler: Sampler,
    pool: SlotPool,
    limits: Rollout,
    tool_format: ToolFormat,
    rewards: Sequence[RewardFunction] = (),
    factories: Mapping[str, Factory] | None = None,
    at_least: int = 0,
) -> Group:
    """Roll out a prompt: every completion with a slot of its own, resets included.

    A completion that fails is a fact in the group; its siblings go on.

    Args:
        prompt: what to complete, and how many times.
        chat: with the tools of the prompt's environment.
        sampler: samples tokens.
        pool: environments.
        limits: of each episode.
        tool_format: how the model writes tool calls.
        rewards: reward functions to be called here, on the snapshots.
        factories: environments by name, for thawing those snapshots.
        at_least: oldest policy version that may sample.

    Raises:
        EngineUnavailableError: no engine answers; the group is to be tried again.
        DataError: the prompt names an unknown environment, or the chat template refuses it.
    """
    completions: dict[int, Completion] = {}
    errors: list[PenstockError] = []

    async def one(index: int) -> None:
        try:
            async with pool.slot(prompt.environment) as slot:
                completions[index] = await play(
                    prompt,
                    index,
                    chat=chat,
                    sampler=sampler,
                    slot=slot,
                    limits=limits,
                    tool_format=tool_format,
                    at_least=at_least,
                )
        except PenstockError as error:  # about all completions alike; raised as itself, not as a group of itself
            errors.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for index in range(prompt.group_size):
            tasks.start_soon(one, index)
    if errors:
        raise errors[0]
    group = Group(prompt=prompt, completions=[completions[index] for index in range(prompt.group_size)])
    await add_parts(group, rewards, factories or {}, limits.reward_timeout_s)
    return group
