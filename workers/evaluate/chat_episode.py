"""Episodes whose turns a chat endpoint samples: there are messages and rewards, and no tokens to train on."""

from contextlib import nullcontext

import anyio
from msgspec.structs import replace

from envs.contract import Observation
from envs.factory import EnvironmentFactory
from envs.messages import is_empty_prompt
from stream.errors import EngineError
from stream.records import Completion, Failure, Group, Message, Prompt, Row
from stream.validity import RolloutReason, TruncationReason
from workers.evaluate.chat_endpoint import ChatEndpoint, ChatTurn
from workers.role.rewards import add_reward_parts, load_factories, open_reward_functions
from workers.rollout.conversation import EMPTY_PROMPT, turn_message
from workers.rollout.engine_client.sampling import end_after_error, turn_seed
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.episode import BaseEpisode, EnvironmentContext, EnvironmentReplies, EpisodeEnd, measure_time
from workers.rollout.messages import append_observation
from workers.rollout.sandbox_host import SandboxHost, open_host_if_needed
from workers.rollout.sandboxes import episode_sandboxes
from workers.rollout.tool_formats.parsing import ParsedTurn, reasoning_end
from workers.score.worker import score_group
from workers.settings import Settings

_MAX_EPISODES = 16
"""Episodes at the same time, so that a server with a small queue does not time out."""


async def play_group(settings: Settings, endpoint: ChatEndpoint, prompt: Prompt) -> Group:
    """Play all episodes of a prompt, and score them.

    Args:
        settings: environments, rewards, and the limits of `[rollout]`.
        endpoint: samples the model's turns.
        prompt: what to play, and how often.
    """
    factories = await anyio.to_thread.run_sync(load_factories, settings)
    shown = [tool.schema for tool in factories[prompt.environment or ""].tools]
    tools = shown if settings.data.chat_template_kwargs.get("tools", True) else []
    completions: dict[int, Completion] = {}
    limiter = anyio.CapacityLimiter(_MAX_EPISODES)

    async def run_episode(pool: EnvironmentPool, host: SandboxHost | None, index: int) -> None:
        async with limiter, pool.slot(prompt.environment) as slot:
            with nullcontext() if host is None else episode_sandboxes(host, None, index) as sandboxes:
                context = EnvironmentContext(
                    prompt=prompt, index=index, slot=slot, limits=settings.rollout, sandboxes=sandboxes
                )
                completions[index] = await ChatEpisode(context, endpoint, tools).run()

    played = {prompt.environment or "": factories[prompt.environment or ""]}
    async with (
        EnvironmentPool(factories, size=_MAX_EPISODES) as pool,
        open_host_if_needed(played, settings.sandboxes) as host,
        anyio.create_task_group() as tasks,
    ):
        for index in range(prompt.group_size):
            tasks.start_soon(run_episode, pool, host, index)
    group = Group(prompt=prompt, completions=[completions[index] for index in sorted(completions)])
    await _score(settings, group, factories)
    return group


async def _score(settings: Settings, group: Group, factories: dict[str, EnvironmentFactory]) -> None:
    timeout_s = settings.rollout.call_timeout_s
    async with open_reward_functions(settings, "rollout") as first, open_reward_functions(settings, "score") as rest:
        await add_reward_parts(group, first, factories, timeout_s)
        await score_group(group, rest, factories, timeout_s)


class ChatEpisode(BaseEpisode):
    """One conversation with a chat endpoint, with the tools, limits and rewards of a run's episode.

    Args:
        context: of the episode.
        endpoint: samples the turns.
        tools: schemas of the environment's tools.
    """

    def __init__(self, context: EnvironmentContext, endpoint: ChatEndpoint, tools: list[dict[str, object]]) -> None:
        super().__init__(context)
        self._endpoint, self._tools = endpoint, tools
        self._replies = EnvironmentReplies(context, self.completion, self.clock)

    def prompt_messages(self, observation: Observation) -> list[Message]:
        """Return the prompt with the observation appended."""
        return append_observation(self.context.prompt.messages, observation)

    def rows(self) -> list[Row]:
        """Return no rows: the endpoint reports no tokens."""
        return []

    async def run_turns(self) -> EpisodeEnd:
        """Sample and call tools, turn by turn."""
        if not self.context.prompt.is_plain_text and is_empty_prompt(self.completion.prompt_messages):
            return Failure(reason=RolloutReason.ENV_RESET, detail=EMPTY_PROMPT)
        with self.clock:
            return await self._converse()
        return self.clock.running

    async def _converse(self) -> EpisodeEnd:
        completion = self.completion
        while True:
            turn = await self._sample()
            if not isinstance(turn, ChatTurn):
                return turn
            parsed = self._usable(turn)
            message = turn_message(parsed)
            completion.messages.append(message | ({"reasoning_content": turn.reasoning} if turn.reasoning else {}))
            if turn.is_truncated:
                return TruncationReason.LENGTH
            content = parsed.content
            replies = await self._replies.after(parsed, content[reasoning_end(content) :].lstrip())
            if replies is None or isinstance(replies, Failure):
                return replies
            if end := self._replies.limit_reached():
                return end

    def _usable(self, turn: ChatTurn) -> ParsedTurn:
        """Return a turn with an id for each call; without tools, calls are only text, as in a run."""
        if self.context.slot is None or not self.context.slot.has_tools:
            return ParsedTurn(turn.text)
        calls = [replace(call, id=self._replies.new_call_id()) for call in turn.parsed.calls]
        return replace(turn.parsed, calls=calls)

    async def _sample(self) -> ChatTurn | Failure | TruncationReason:
        completion, limits, context = self.completion, self.context.limits, self.context
        sampling = limits.sampling
        options = {
            "temperature": limits.temperature,
            "max_tokens": limits.max_tokens_per_turn,
            "seed": turn_seed(context.seed, completion.turns) & 0x7FFF_FFFF,
            **({"top_p": sampling.top_p} if sampling.top_p != 1 else {}),
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }
        messages = [*completion.prompt_messages, *completion.messages]
        try:
            with measure_time(completion, "engine"):
                turn = await self._endpoint.complete(messages, self._tools, options)
        except EngineError as error:
            return end_after_error(error, completion.turns)
        completion.turns += 1
        return turn
