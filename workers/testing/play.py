"""An author's unit test of an environment, without a model: the test says what the model would have said.

>>> played = play(Guess, [call("guess", number=50), call("guess", number=7), "It is 7."], fields={"secret": 7})
>>> played.value, played.replies
(1.0, ['higher', 'correct'])

The episode goes through the code that a rollout worker runs: slot, parser, limits, deadlines, rewards, snapshot. Only
the tokens are made up, one to a byte of text.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import anyio

from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from envs.rewards.merge import merge_parts
from envs.snapshot import thaw
from envs.tools import ToolSpec
from stream.records import Completion, Failure, Message, Prompt, RewardPart
from stream.validity import Measured, Reward, TruncationReason
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats.registry import TOOL_FORMATS
from workers.runtime.daemon_thread import run_in_daemon_thread
from workers.settings import Rollout
from workers.testing.scripted_sampler import ScriptedSampler, scripted_chat

_NAME = "played"
_UNLIMITED = 10_000_000


@dataclass(frozen=True)
class Call:
    """A tool call that the model is to make; `call` makes one."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        said = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{said}\n</tool_call>"


def call(name: str, /, **arguments: Any) -> Call:
    """A tool call, for `play`."""
    return Call(name, arguments)


@dataclass(frozen=True)
class EpisodeResult:
    """What came of an episode."""

    messages: list[Message]
    """The whole conversation as the model saw it: the prompt with what `reset` returned, then every turn."""
    parts: list[RewardPart]
    """What `get_reward` and the reward functions measured, or did not."""
    reward: Reward | None
    """The parts merged, `Measured` or `Unmeasured` with its reason; None where the rollout failed."""
    failure: Failure | None
    """The rollout failed: nobody knows what the policy would have done."""
    truncated: TruncationReason | None
    """A limit ended the episode."""
    environment: Any
    """The thawed snapshot, as reward functions get it; None where the rollout failed."""
    snapshot_bytes: int
    unused_turns: list[Any]
    """What the model was to say, had the episode not ended before."""
    completion: Completion = field(repr=False)
    """The record that a run would store."""
    tools: list[ToolSpec] = field(repr=False)
    """As the model is shown them."""

    @property
    def is_valid(self) -> bool:
        """Whether a reward was measured."""
        return isinstance(self.reward, Measured)

    @property
    def reward_value(self) -> float:
        """The reward.

        Raises:
            ValueError: it is invalid; says why.
        """
        if isinstance(self.reward, Measured):
            return self.reward.value
        why = self.reward or self.failure
        raise ValueError(f"no reward: {why.reason} {why.detail}".rstrip() if why else "no reward")

    @property
    def tool_replies(self) -> list[str]:
        """What the tools answered, errors included, in order."""
        return [message["content"] for message in self.messages if message["role"] == "tool"]


def play(
    factory: "Callable[..., object] | str",
    turns: "Iterable[str | Call | Sequence[Call]]",
    *,
    fields: Mapping[str, Any] = MappingProxyType({}),
    prompt: str | list[Message] = "",
    args: Mapping[str, Any] = MappingProxyType({}),
    rewards: Sequence[Callable[..., Any] | str] = (),
    seed: int = 0,
    limits: Rollout | None = None,
) -> EpisodeResult:
    """Play one episode with scripted replies of the model.

    After the last reply the model says nothing, which ends the episode.

    Args:
        factory: a class, a function that makes environments, or a reference as the settings have it.
        turns: the model's turns: a text, a `call`, or several calls for one turn.
        fields: the prompt row's columns, for `reset` and the reward functions.
        prompt: the user's text, or messages.
        args: for the factory.
        rewards: reward functions, or references to some, called on the conversation and the snapshot.
        seed: of the prompt.
        limits: deadlines and limits as under `[rollout]`; those on tokens count bytes here, and are out of reach unless
            given.

    Raises:
        ReferenceNotFoundError: there is no such environment or reward function, or it cannot be made.
    """
    environment = (
        EnvironmentFactory.load(factory, args)
        if isinstance(factory, str)
        else EnvironmentFactory.from_callable(factory, args)
    )
    functions = [RewardFunction.load(r) if isinstance(r, str) else RewardFunction(r, _name(r)) for r in rewards]
    limits = limits or Rollout(max_tokens=_UNLIMITED, max_tokens_per_turn=_UNLIMITED)
    row = Prompt(
        id="play:0:0",
        messages=[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        is_plain_text=isinstance(prompt, str),
        fields=dict(fields),
        environment=_NAME,
        group_size=1,
        seed=seed,
    )
    planned = list(turns)
    script = ScriptedSampler([_text(turn) for turn in planned])
    completion = run_in_daemon_thread(partial(_play, environment, row, script, functions, limits))
    return EpisodeResult(
        messages=[*(completion.prompt_messages or row.messages), *completion.messages],
        parts=completion.parts,
        reward=merge_parts(completion.parts) if completion.failure is None else None,
        failure=completion.failure,
        truncated=completion.truncated,
        environment=thaw(completion.snapshot, environment) if completion.snapshot else None,
        snapshot_bytes=len(completion.snapshot or b""),
        unused_turns=planned[script.turns_sampled :],
        completion=completion,
        tools=environment.tools,
    )


async def _play(
    environment: EnvironmentFactory,
    prompt: Prompt,
    script: ScriptedSampler,
    rewards: list[RewardFunction],
    limits: Rollout,
) -> Completion:
    renders = await anyio.to_thread.run_sync(scripted_chat)
    async with AsyncExitStack() as stack:
        for function in rewards:
            await stack.enter_async_context(function.open())
        pool = await stack.enter_async_context(EnvironmentPool({_NAME: environment}, size=1))
        group = await GroupRunner(
            chats={prompt.environment: ChatSetup(renders, TOOL_FORMATS["hermes"])},
            sampler=script,
            pool=pool,
            limits=limits,
            rewards=rewards,
            factories={_NAME: environment},
        ).run(prompt)
    return group.completions[0]


def _text(reply: "str | Call | Sequence[Call]") -> str:
    return str(reply) if isinstance(reply, str | Call) else "\n".join(map(str, reply))


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
