"""Plays one episode of an environment with a scripted model: turns from a list, and one token per byte of text.

>>> played = play(Guess, [call("guess", number=50), call("guess", number=7), "It is 7."], fields={"secret": 7})
>>> played.reward_value, played.tool_replies
(1.0, ['lower', 'correct'])

The episode runs the code of a rollout worker: slot, parser, limits, deadlines, rewards, snapshot. Only the tokens are
artificial.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import anyio
import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from envs.rewards.parts import merge_parts
from envs.snapshot import thaw
from envs.tools import ToolSpec
from stream.records import Completion, Failure, Message, Prompt, RewardPart, Span
from stream.validity import Measured, Reward, TruncationReason
from stream.waiting import run_in_daemon_thread
from workers.rollout.agent_endpoint.endpoint import serve_endpoint
from workers.rollout.agent_endpoint.request_log import RequestLog
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.template import ChatTemplate
from workers.rollout.engine_client.sampling import SampledTurn, SamplingOptions
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.sandbox_host import open_host_if_needed
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import RolloutSettings, SandboxSettings

T = TypeVar("T")

_NAME = "played"
UNLIMITED = 10_000_000
"""Tokens of an episode whose length is no matter."""
_START, _END = "<|start|>", "<|end|>"
_TEMPLATE = """\
{%- for message in messages %}
{{- '<|start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content or [] %}{{- part | tojson }}{%- endfor %}{%- endif %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Call:
    """A tool call in a scripted turn; created by `call`."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        rendered = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{rendered}\n</tool_call>"


def call(name: str, /, **arguments: Any) -> Call:
    """Return a tool call for `play`."""
    return Call(name, arguments)


@dataclass(frozen=True)
class EpisodeResult:
    """Result of an episode."""

    messages: list[Message]
    """Whole conversation as the model saw it: the prompt with the messages from `reset`, then every turn."""
    parts: list[RewardPart]
    """Results of `get_reward` and of the reward functions, measured or not."""
    reward: Reward | None
    """Merged parts: `Measured`, or `Unmeasured` with its reason; None if the rollout failed."""
    failure: Failure | None
    """Why the rollout failed, which tells nothing about the policy; None if it did not."""
    truncated: TruncationReason | None
    """Limit that ended the episode; None if none did."""
    environment: Any
    """Thawed snapshot, as reward functions receive it; None if there is none."""
    snapshot_bytes: int
    unused_turns: list[Any]
    """Scripted turns left when the episode ended."""
    completion: Completion = field(repr=False)
    """Record that a run would store."""
    tools: list[ToolSpec] = field(repr=False)
    """Tool schemas that the model would see."""

    @property
    def is_valid(self) -> bool:
        """Whether a reward was measured."""
        return isinstance(self.reward, Measured)

    @property
    def reward_value(self) -> float:
        """The measured reward.

        Raises:
            ValueError: no reward was measured; gives the reason.
        """
        if isinstance(self.reward, Measured):
            return self.reward.value
        why = self.reward or self.failure
        raise ValueError(f"no reward: {why.reason} {why.detail}".rstrip() if why else "no reward")

    @property
    def tool_replies(self) -> list[str]:
        """Answers of the tools in order, errors included."""
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
    limits: RolloutSettings | None = None,
) -> EpisodeResult:
    """Run one episode with scripted turns of the model.

    Turns after the last one are empty, which ends the episode. `max_turns` ends it where the environment has `respond`.

    Args:
        factory: environment class, factory function, or a reference as in the settings.
        turns: the model's turns; each is a text, a `call`, or a list of calls.
        fields: columns of the prompt's row, for `reset` and the reward functions.
        prompt: the user's text, or messages.
        args: arguments of the factory.
        rewards: reward functions or references, called with the conversation and the snapshot.
        seed: seed of the prompt.
        limits: deadlines and limits as under `[rollout]`. Token limits count bytes; the default ones are too high to be
            reached.

    Raises:
        ReferenceNotFoundError: an environment or a reward function does not exist or cannot be created.
    """
    environment = (
        EnvironmentFactory.load(factory, args)
        if isinstance(factory, str)
        else EnvironmentFactory.from_callable(factory, args)
    )
    functions = [RewardFunction.load(r) if isinstance(r, str) else RewardFunction(r, _name(r)) for r in rewards]
    planned = list(turns)
    is_text = isinstance(prompt, str)
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    row = Prompt(
        id="play:0:0", messages=messages, is_plain_text=is_text, fields=dict(fields), environment=_NAME, seed=seed
    )
    script = ScriptedSampler([_text(turn) for turn in planned])
    limits = limits or RolloutSettings(max_tokens=UNLIMITED, max_tokens_per_turn=UNLIMITED)
    if environment.responds:  # it must not go on after the script
        limits = msgspec.structs.replace(limits, max_turns=min(limits.max_turns, max(1, len(planned))))
    completion = run_in_daemon_thread(partial(play_script, environment, row, script, limits, functions))
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


async def play_script(
    environment: EnvironmentFactory,
    prompt: Prompt,
    script: "ScriptedSampler",
    limits: RolloutSettings,
    rewards: Sequence[RewardFunction] = (),
    seen: RequestLog | None = None,
    setup: ChatSetup | None = None,
    sandboxes: SandboxSettings = SandboxSettings(),  # noqa: B008  (frozen)
) -> Completion:
    """Run one episode of an environment, which may have a loop of its own, with a scripted model.

    Args:
        environment: makes it.
        prompt: row and seed.
        script: the model.
        limits: of the episode.
        rewards: reward functions.
        seen: gets the requests of an environment with a loop of its own.
        setup: the chat of a model; default: one that renders any conversation, without tools.
        sandboxes: for an environment that opens some.
    """
    setup = setup or ChatSetup(await anyio.to_thread.run_sync(scripted_chat), TOOL_FORMATS["hermes"])
    name = prompt.environment or _NAME
    async with AsyncExitStack() as stack:
        for function in rewards:
            await stack.enter_async_context(function.open())
        pool = await stack.enter_async_context(EnvironmentPool({name: environment}, size=1))
        endpoint = (
            await stack.enter_async_context(serve_endpoint("127.0.0.1", seen)) if environment.runs_own_loop else None
        )
        group = await GroupRunner(
            chats={prompt.environment: setup},
            sampler=script,
            pool=pool,
            limits=limits,
            rewards=rewards,
            factories={name: environment},
            endpoint=endpoint,
            sandboxes=await stack.enter_async_context(open_host_if_needed({name: environment}, sandboxes)),
        ).run(prompt)
    return group.completions[0]


def _text(reply: "str | Call | Sequence[Call]") -> str:
    return str(reply) if isinstance(reply, str | Call) else "\n".join(map(str, reply))


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


class ScriptedSampler:
    """Samples scripted turns; later turns are empty, which ends an episode.

    Args:
        turns: texts of the model's turns.
        chat: whose tokens they are; default: `scripted_chat`.
        context_length: tokens that the model takes, as environments with a loop of their own are given it; 0: unknown.
    """

    def __init__(self, turns: Sequence[str], chat: ChatTokenizer | None = None, context_length: int = 0) -> None:
        self.turns_sampled = 0
        """Number of turns so far, including turns after the end of the script."""
        self.longest = 0
        """Tokens of the longest context."""
        self.context_length = context_length
        self._turns, self._chat = turns, chat

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingOptions,
        *,
        min_policy_version: int = 0,  # noqa: ARG002
    ) -> SampledTurn:
        """See `Sampler.sample`."""
        await anyio.lowlevel.checkpoint()
        text = self._turns[self.turns_sampled] if self.turns_sampled < len(self._turns) else ""
        self.turns_sampled += 1
        self.longest = max(self.longest, len(prompt_ids))
        ids = (self._chat or scripted_chat()).turn_ids(text)
        is_cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        return SampledTurn(ids, [-1.0] * len(ids), "length" if is_cut else "stop", [Span(0, 0, len(ids))])


@lru_cache(maxsize=1)
def scripted_chat() -> ChatTokenizer:
    """Return a tokenizer that renders any conversation, without tools."""
    return ChatTokenizer(_tokenizer(), ChatTemplate(_TEMPLATE, {}, Path("scripted")), None, set())


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (_START, _END)])
    return tokenizer
