"""All completions of one prompt, at the same time."""

from collections.abc import Mapping, Sequence

import anyio
import msgspec

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


async def roll_out(  # noqa: PLR0913  (by keyword, and each is a thing of its own)
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
    greedy: bool = False,
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
        greedy: play one more episode, the last of the group, at temperature 0. It differs in nothing else: it has a
            slot, tools and rewards like its siblings, and its index is the prompt's group size.

    Raises:
        EngineUnavailableError: no engine answers; the group is to be tried again.
        DataError: the prompt names an unknown environment, or the chat template refuses it.
    """
    at_temperature_0 = msgspec.structs.replace(limits, temperature=0.0)
    completions: dict[int, Completion] = {}
    errors: list[PenstockError] = []

    async def one(index: int) -> None:
        is_greedy = index == prompt.group_size
        try:
            async with pool.slot(prompt.environment) as slot:
                completion = await play(
                    prompt,
                    index,
                    chat=chat,
                    sampler=sampler,
                    slot=slot,
                    limits=at_temperature_0 if is_greedy else limits,
                    tool_format=tool_format,
                    at_least=at_least,
                )
            completion.greedy = is_greedy
            completions[index] = completion
        except PenstockError as error:  # about all completions alike; raised as itself, not as a group of itself
            errors.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for index in range(prompt.group_size + greedy):
            tasks.start_soon(one, index)
    if errors:
        raise errors[0]
    group = Group(prompt=prompt, completions=[completions[index] for index in sorted(completions)])
    await add_parts(group, rewards, factories or {}, limits.reward_timeout_s)
    return group
