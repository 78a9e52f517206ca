"""A rollout worker: prompts in, groups of completions out, many groups at once."""

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import structlog

from envs.factory import EnvironmentFactory
from stream.errors import DataError, SettingsError
from stream.queue.stage import Lease, Stage
from stream.records import Group, Prompt
from workers.engine_api.discovery.discovery import EngineDiscovery
from workers.rollout.agent_endpoint.endpoint import serve_endpoint_if_needed
from workers.rollout.chat.chat_setup import load_chat_setups
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.evaluation import EvaluationRollout
from workers.rollout.group import run_group
from workers.rollout.stale_canceller import StaleCanceller
from workers.runtime.concurrency import ConcurrencyLimit
from workers.runtime.context import WorkerContext
from workers.runtime.reward_functions import load_factories, open_reward_functions
from workers.runtime.work_loop import work_loop
from workers.settings import Rollout

log = structlog.get_logger()


async def rollout(context: WorkerContext) -> None:
    """Roll out prompts until the run has ended."""
    settings = context.settings
    discovery = await EngineDiscovery.from_settings(settings.engine, context.connection)
    if not discovery.urls and not settings.engine.urls:
        raise SettingsError(
            "engine.urls is empty, no --engine was given, and `penstock engines add` has added none: a rollout worker "
            "needs an engine"
        )
    if truncating := settings.truncated_sampling:
        log.warning(
            "rollout.truncated_sampling", keys=truncating, effect="the ratio to the engine's log-probs is not 1"
        )
    factories = await anyio.to_thread.run_sync(load_factories, settings)
    _check_rewards(settings.rewards, factories)
    chat_setups = await anyio.to_thread.run_sync(load_chat_setups, settings, Path(settings.model.path), factories)
    with_greedy = settings.estimator.name == "remax"
    max_groups = settings.rollout.groups_in_flight
    pool = EnvironmentPool(factories, size=max_groups * (settings.rollout.group_size + with_greedy))
    concurrency = ConcurrencyLimit(max_groups)
    stage = Stage(context.connection, "prompts", context.consumer, context.retry_policy, settings.capacity)
    stale_canceller = StaleCanceller(stage, settings.pacing.max_staleness)
    evaluation = await EvaluationRollout.from_context(context, factories, concurrency) if settings.eval.path else None

    async with (
        EngineClient.from_settings(settings, discovery) as engine,
        pool,
        evaluation.pool if evaluation else nullcontext(),
        open_reward_functions(settings, "rollout") as rewards,
        serve_endpoint_if_needed(factories, settings.run.host) as endpoint,
    ):
        await engine.wait_until_ready()

        async def roll_out(lease: Lease, prompt: Prompt, limits: Rollout, pool: EnvironmentPool, **more: Any) -> Group:
            claimed_at = time.time()
            if prompt.environment not in chat_setups:
                raise DataError(f"prompt {prompt.id}: environment {prompt.environment!r} is unknown")
            chat, tool_format = chat_setups[prompt.environment]
            group = await run_group(
                prompt,
                chat=chat,
                sampler=engine,
                pool=pool,
                limits=limits,
                tool_format=tool_format,
                rewards=rewards,
                factories=factories,
                endpoint=endpoint,
                **more,
            )
            group.attempt = lease.infra_failures + lease.data_failures + len(lease.cancelled_attempts_s)
            group.cancelled_attempts_s = list(lease.cancelled_attempts_s)
            group.worker = context.consumer
            group.claimed_at = claimed_at
            group.rolled_out_at = time.time()
            return group

        async def work(lease: Lease, version: int) -> None:
            stale_canceller.cancel_if_stale(lease)
            prompt = lease.prompt()
            more: dict[str, Any] = {"min_policy_version": max(0, version), "with_greedy": with_greedy}
            if settings.rollout.save_partial_groups:
                more |= {
                    "partials": await stage.load_partial(lease),
                    "save_partial": partial(stage.save_partial, lease),
                }
            await stage.complete(lease, "groups", await roll_out(lease, prompt, settings.rollout, pool, **more))

        async def evaluate(held_out: EvaluationRollout, lease: Lease, _version: int) -> None:
            prompt, version = held_out.read_lease(lease)
            group = await roll_out(lease, prompt, held_out.limits, held_out.pool, min_policy_version=version)
            group.evaluated_version = version
            await held_out.stage.complete(lease, "eval:groups", group)

        async with anyio.create_task_group() as tasks:
            if settings.pacing.stale_policy == "cancel":
                tasks.start_soon(stale_canceller.watch)
            async with anyio.create_task_group() as pumps:
                pumps.start_soon(partial(work_loop, stage, work, concurrency=concurrency, stopping=context.stopping))
                if evaluation is not None:
                    works = partial(evaluate, evaluation)
                    pumps.start_soon(
                        partial(
                            work_loop,
                            evaluation.stage,
                            works,
                            concurrency=evaluation.concurrency,
                            stopping=context.stopping,
                        )
                    )
            tasks.cancel_scope.cancel()


def _check_rewards(rewards: tuple[object, ...], factories: dict[str, EnvironmentFactory]) -> None:
    if rewards:
        return
    without_reward = [name for name, factory in factories.items() if not factory.has_reward]
    if without_reward:
        raise SettingsError(
            f"environment {without_reward[0]!r} has no get_reward and there are no [[rewards]]: nothing would measure "
            "a reward; add a reward function"
        )
