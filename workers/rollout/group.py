"""All completions of one prompt, at the same time."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import msgspec

from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from stream.errors import DataError, PenstockError
from stream.records import Completion, Group, Message, Prompt
from workers.rollout.agent_endpoint.agent_episode import run_agent_episode
from workers.rollout.agent_endpoint.endpoint import AgentEndpoint
from workers.rollout.agent_endpoint.recorder import chats_by_tools
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.engine_client.sampling import Sampler
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.episode import run_episode
from workers.rollout.tool_formats.parsed_turn import ToolFormat
from workers.runtime.reward_functions import add_reward_parts
from workers.settings import Rollout


async def run_group(  # noqa: PLR0913  (by keyword, and each is a thing of its own)
    prompt: Prompt,
    *,
    chat: ChatTokenizer,
    sampler: Sampler,
    pool: EnvironmentPool,
    limits: Rollout,
    tool_format: ToolFormat,
    rewards: Sequence[RewardFunction] = (),
    factories: Mapping[str, EnvironmentFactory] | None = None,
    min_policy_version: int = 0,
    with_greedy: bool = False,
    partials: Sequence[Completion] = (),
    save_partial: Callable[[Completion], Awaitable[None]] | None = None,
    endpoint: AgentEndpoint | None = None,
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
        min_policy_version: oldest policy version that may sample.
        with_greedy: play one more episode, the last of the group, at temperature 0. It differs in nothing else: it
            has a slot, tools and rewards like its siblings, and its index is the prompt's group size.
        partials: completions that an earlier try has finished, whatever became of them; only the others are played.
            Their tokens keep the policy versions that sampled them, `at_least` or not.
        save_partial: called with each completion that is finished while others are not.
        endpoint: where environments that lead their episodes ask for turns; needed only for those.

    Raises:
        EngineUnavailableError: no engine answers; the group is to be tried again.
        DataError: the prompt names an unknown environment, its messages are none, or the chat template refuses them.
    """
    if not prompt.messages or not all(_is_message(message) for message in prompt.messages):
        raise DataError(f"prompt {prompt.id}: its messages are no conversation, with text or parts for content")
    greedy_limits = msgspec.structs.replace(limits, temperature=0.0)
    total = prompt.group_size + with_greedy
    completions = {
        completion.index: completion
        for completion in partials
        if 0 <= completion.index < total and completion.greedy == (completion.index == prompt.group_size)
    }
    missing = [index for index in range(total) if index not in completions]
    errors: list[PenstockError] = []

    async def run_completion(index: int) -> None:
        is_greedy = index == prompt.group_size
        try:
            async with pool.slot(prompt.environment) as slot:
                alike: dict[str, Any] = {
                    "sampler": sampler,
                    "limits": greedy_limits if is_greedy else limits,
                    "tool_format": tool_format,
                    "min_policy_version": min_policy_version,
                }
                if slot is not None and slot.runs_own_loop:
                    if endpoint is None:
                        raise DataError(f"{slot.name!r} leads its episodes itself, and nothing serves an endpoint here")
                    completion = await run_agent_episode(
                        prompt, index, endpoint=endpoint, chats=chats_by_tools(chat), slot=slot, **alike
                    )
                else:
                    completion = await run_episode(prompt, index, chat=chat, slot=slot, **alike)
            completion.greedy = is_greedy
            completions[index] = completion
            if save_partial is not None and len(completions) < total:
                await save_partial(completion)
        except PenstockError as error:  # about all completions alike; raised as itself, not as a group of itself
            errors.append(error)
            tasks.cancel_scope.cancel()
        except RecursionError as error:
            errors.append(DataError(f"prompt {prompt.id}: what it holds is nested too deeply: {error}"))
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for index in missing:
            tasks.start_soon(run_completion, index)
    if errors:
        raise errors[0]
    group = Group(prompt=prompt, completions=[completions[index] for index in sorted(completions)])
    await add_reward_parts(group, rewards, factories or {}, limits.call_timeout_s)
    return group


def _is_message(message: Message) -> bool:
    """Whether its content is what a template, an environment and a reward function may expect."""
    content = message.get("content")
    return content is None or isinstance(content, str) or _are_parts(content)


def _are_parts(content: object) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict) for part in content)
