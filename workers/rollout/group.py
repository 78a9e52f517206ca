"""All completions of one prompt, run concurrently."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field

import anyio
import msgspec
import structlog

from envs.call import call_subject, describe_subject
from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from stream.connection.run_connection import RunConnection
from stream.errors import DataError, PenstockError
from stream.queue.lease import Lease
from stream.records import Completion, Group, Message, Prompt
from workers.role.in_flight_reporter import CompletionProgress, GroupProgress
from workers.role.rewards import add_reward_parts, describe_functions, open_reward_functions
from workers.rollout.agent_endpoint.endpoint import AgentEndpoint, run_agent_episode, serve_endpoint_if_needed
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.conversation import run_episode
from workers.rollout.engine_client.sampling import Sampler
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.episode import EpisodeContext, new_completion
from workers.rollout.resume import EpisodeJournal, ReplayDiffersError, RestoreMethod
from workers.rollout.sandbox_host import SandboxHost, SandboxOwner, open_host_if_needed
from workers.rollout.sandboxes import LeasedSandboxes, episode_sandboxes
from workers.rollout.turn_journal import TurnJournal
from workers.settings import AgentSettings, RolloutSettings, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRunner:
    """Rolls out prompts, all in the same way."""

    chats: Mapping[str | None, ChatSetup]
    """By environment; None for prompts without one."""
    sampler: Sampler
    pool: EnvironmentPool
    limits: RolloutSettings
    """Limits of each episode, and the sampling distribution."""
    rewards: Sequence[RewardFunction] = ()
    """Reward functions that run here, on the snapshots."""
    factories: Mapping[str, EnvironmentFactory] = field(default_factory=dict)
    """Environments by name, to thaw those snapshots."""
    endpoint: AgentEndpoint | None = None
    """Needed by environments that run their own loop."""
    agents: AgentSettings = field(default_factory=AgentSettings)
    """For these."""
    sandboxes: SandboxHost | None = None
    """Needed by environments that open sandboxes."""

    async def run(
        self,
        prompt: Prompt,
        *,
        min_policy_version: int = 0,
        with_greedy: bool = False,
        progress: GroupProgress | None = None,
        journal: TurnJournal | None = None,
        owner: SandboxOwner | None = None,
    ) -> Group:
        """Roll out one prompt. A completion that fails is recorded as failed in the group; the others go on.

        Args:
            prompt: what to complete, and how many times.
            min_policy_version: oldest policy version that may sample.
            with_greedy: run one more episode at temperature 0, the last of the group; its index is the group size.
            progress: where to note what the group is doing.
            journal: where finished completions and turns of the others are saved. What earlier attempts saved is not
                sampled again, at whatever policy version.
            owner: the lease on the prompt, which owns its sandboxes; None: of no run.

        Raises:
            EngineUnavailableError | SandboxFailure: no engine answers, or no sandbox starts; try again later.
            DataError: the environment is unknown, the messages are malformed, or the chat template refuses them.
        """
        self._validate(prompt)
        total = prompt.group_size + with_greedy
        progress = progress or GroupProgress()
        completions = _reusable(journal.completions if journal else (), prompt, total)
        progress.total, progress.ended = total, len(completions)
        errors: list[PenstockError] = []

        async def run_completion(index: int) -> None:
            try:
                with progress.completion(index) as own:
                    completion = await self._run_episode(prompt, index, min_policy_version, own, journal, owner)
                completions[index] = completion
            except PenstockError as error:  # concerns all; raised below as itself, not in an exception group
                errors.append(error)
                tasks.cancel_scope.cancel()
            except RecursionError as error:
                errors.append(DataError(f"prompt {prompt.id}: its content is nested too deeply: {error}"))
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for index in range(total):
                if index not in completions:
                    tasks.start_soon(run_completion, index)
        if errors:
            raise errors[0]
        group = Group(prompt=prompt, completions=[completions[index] for index in sorted(completions)])
        await add_reward_parts(group, self.rewards, self.factories, self.limits.call_timeout_s, progress)
        return group

    @property
    def _survives(self) -> bool:
        """Sandboxes survive this worker."""
        return self.sandboxes is not None and self.sandboxes.provider.survives_worker

    def _open_sandboxes(self, owner: SandboxOwner | None, index: int) -> AbstractContextManager[LeasedSandboxes]:
        if self.sandboxes is None:
            raise DataError("an environment opens sandboxes, but none can be made here")
        return episode_sandboxes(self.sandboxes, owner, index)

    def describe(self, lease: Lease) -> str:
        """Return what user code runs for a prompt: `environment NAME, reward function NAME`."""
        name = lease.prompt().environment
        environment = f"environment {name}" if name else ""
        return ", ".join(filter(None, [environment, describe_functions(self.rewards, name)]))

    def _validate(self, prompt: Prompt) -> None:
        if prompt.environment not in self.chats:
            raise DataError(f"prompt {prompt.id}: environment {prompt.environment!r} is unknown")
        if not prompt.messages or not all(_is_valid(message) for message in prompt.messages):
            raise DataError(f"prompt {prompt.id}: its messages are not a conversation whose contents are text or parts")

    async def _run_episode(
        self,
        prompt: Prompt,
        index: int,
        min_policy_version: int,
        progress: CompletionProgress,
        journal: TurnJournal | None,
        owner: SandboxOwner | None,
    ) -> Completion:
        structlog.contextvars.bind_contextvars(completion=index)
        call_subject.set(describe_subject(f"environment {prompt.environment}, prompt {prompt.id}"))
        is_greedy = index == prompt.group_size
        chat, tool_format = self.chats[prompt.environment]
        async with self.pool.slot(prompt.environment) as slot:
            own = None if journal is None else EpisodeJournal(journal, index, slot, survives=self._survives)
            context = EpisodeContext(
                prompt=prompt,
                index=index,
                chat=chat,
                tool_format=tool_format,
                sampler=self.sampler,
                slot=slot,
                limits=msgspec.structs.replace(self.limits, temperature=0.0) if is_greedy else self.limits,
                min_policy_version=min_policy_version,
                progress=progress,
                agents=self.agents,
                journal=own,
            )
            completion = await self._restore_or_run(context, owner)
        if own is not None:
            own.finish(completion)
        return completion

    async def _restore_or_run(self, context: EpisodeContext, owner: SandboxOwner | None) -> Completion:
        journal = context.journal
        if journal is not None and journal.method is RestoreMethod.NEVER:
            return journal.failed(new_completion(context))
        try:
            return await self._run_with_sandboxes(context, owner)
        except ReplayDiffersError as error:
            if journal is None:
                raise
            journal.begin_anew(str(error))
        return await self._run_with_sandboxes(context, owner)

    async def _run_with_sandboxes(self, context: EpisodeContext, owner: SandboxOwner | None) -> Completion:
        if context.slot is None or not context.slot.uses_sandboxes:
            return await self._run_in_slot(context)
        journal = context.journal
        with self._open_sandboxes(owner, context.index) as sandboxes:
            adopts = journal is not None and journal.method is RestoreMethod.ADOPT
            if journal is not None and adopts and not await sandboxes.adopt_all(journal.sandboxes):
                journal.give_up_sandboxes()
            completion = await self._run_in_slot(msgspec.structs.replace(context, sandboxes=sandboxes))
            if journal is not None:
                await journal.finish_now(completion)
        return completion

    async def _run_in_slot(self, context: EpisodeContext) -> Completion:
        if context.slot is None or not context.slot.runs_own_loop:
            return await run_episode(context)
        if self.endpoint is None:
            raise DataError(f"{context.slot.name!r} runs its own loop, but no endpoint is served here")
        return await run_agent_episode(context, context.slot, self.endpoint)


def with_attempt(group: Group, lease: Lease, *, worker: str, claimed_at: float) -> Group:
    """Return the group with the facts about the attempt that rolled it out, which ends now.

    Args:
        group: what was rolled out.
        lease: of its prompt.
        worker: name of the worker.
        claimed_at: Unix time at which the worker started.
    """
    return msgspec.structs.replace(
        group,
        prompt=msgspec.structs.replace(group.prompt, fed_at=lease.entered_at),
        attempt=lease.earlier_attempts,
        cancelled_attempts_s=list(lease.cancelled_attempts_s),
        evaluated_version=lease.evaluated_version,
        worker=worker,
        claimed_at=claimed_at,
        rolled_out_at=time.time(),
    )


def _reusable(partials: Sequence[Completion], prompt: Prompt, total: int) -> dict[int, Completion]:
    """Return those completions of an earlier attempt that fit this one, by index."""
    return {
        completion.index: completion
        for completion in partials
        if 0 <= completion.index < total and completion.greedy == (completion.index == prompt.group_size)
    }


def _is_valid(message: Message) -> bool:
    """Whether templates, environments and reward functions can handle the message's content."""
    content = message.get("content")
    return content is None or isinstance(content, str) or _are_parts(content)


def _are_parts(content: object) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict) for part in content)


@asynccontextmanager
async def open_group_runner(
    settings: Settings,
    factories: Mapping[str, EnvironmentFactory],
    chats: Mapping[str | None, ChatSetup],
    sampler: Sampler,
    *,
    max_episodes: int,
    connection: RunConnection | None = None,
) -> AsyncIterator[GroupRunner]:
    """Open what episodes need besides an engine: environments, reward functions, an endpoint for agents.

    Args:
        settings: of the run.
        factories: the run's environments.
        chats: by environment.
        sampler: the engines.
        max_episodes: largest number of concurrent episodes.
        connection: to the run whose episodes these are; None: of no run.
    """
    async with (
        EnvironmentPool(factories, size=max_episodes) as pool,
        open_reward_functions(settings, "rollout") as rewards,
        serve_endpoint_if_needed(factories, settings.run.host) as endpoint,
        open_host_if_needed(factories, settings.sandboxes, connection) as sandboxes,
    ):
        yield GroupRunner(
            chats=chats,
            sampler=sampler,
            pool=pool,
            limits=settings.rollout,
            agents=settings.agents,
            rewards=rewards,
            factories=factories,
            endpoint=endpoint,
            sandboxes=sandboxes,
        )
