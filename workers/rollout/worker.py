"""A rollout worker: prompts in, groups of completions out, many groups at once."""

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import structlog

from envs.factory import Factory
from stream.errors import DataError, SettingsError
from stream.records import Group, Prompt
from stream.stage import Lease, Stage
from workers.fleet.roster import Roster
from workers.parts import load_factories, opened
from workers.pump import pump
from workers.role import Role
from workers.rollout.chat.spoken import load_spoken
from workers.rollout.engine.client import EngineClient
from workers.rollout.group import roll_out
from workers.rollout.held_out import HeldOut
from workers.rollout.led.endpoint import serving_for
from workers.rollout.overtaking import Overtaking
from workers.rollout.slot_pool import SlotPool
from workers.room import Room
from workers.settings import Rollout

log = structlog.get_logger()


async def rollout(role: Role) -> None:
    """Roll out prompts until the run has ended."""
    settings = role.settings
    roster = await Roster.of(settings.engine, role.link)
    if not roster.urls and not settings.engine.dns:
        raise SettingsError(
            "engine.urls and engine.dns are empty, no --engine was given, and `penstock engines add` has named none: a "
            "rollout worker needs an engine"
        )
    factories = await anyio.to_thread.run_sync(load_factories, settings)
    _check_rewards(settings.rewards, factories)
    spoken = await anyio.to_thread.run_sync(load_spoken, settings, Path(settings.model.path), factories)
    greedy = settings.estimator.name == "remax"
    at_once = settings.rollout.groups_in_flight
    pool = SlotPool(factories, size=at_once * (settings.rollout.group_size + greedy))
    room = Room(at_once)
    stage = Stage(role.link, "prompts", role.consumer, role.terms, settings.capacity)
    late = Overtaking(stage, settings.pacing.max_staleness)
    evaluation = await HeldOut.of(role, factories, room) if settings.eval.path else None

    async with (
        EngineClient.of(settings, roster) as engine,
        pool,
        evaluation.pool if evaluation else nullcontext(),
        opened(settings, "rollout") as rewards,
        serving_for(factories, settings.rollout.endpoint_host) as endpoint,
    ):
        await engine.probe()

        async def play(lease: Lease, prompt: Prompt, limits: Rollout, pool: SlotPool, **more: Any) -> Group:
            claimed_at = time.time()
            if prompt.environment not in spoken:
                raise DataError(f"prompt {prompt.id}: environment {prompt.environment!r} is unknown")
            chat, tool_format = spoken[prompt.environment]
            group = await roll_out(
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
            group.attempt = lease.infra_failures + lease.data_failures + len(lease.cancelled_s)
            group.cancelled_s = list(lease.cancelled_s)
            group.worker = role.consumer
            group.claimed_at = claimed_at
            group.rolled_out_at = time.time()
            return group

        async def work(lease: Lease, version: int) -> None:
            late.check(lease)
            prompt = lease.prompt()
            more: dict[str, Any] = {"at_least": max(0, version), "greedy": greedy}
            if settings.rollout.partial:
                more |= {"kept": await stage.kept(lease), "keep": partial(stage.keep_finished, lease)}
            await stage.settle(lease, "groups", await play(lease, prompt, settings.rollout, pool, **more))

        async def evaluate(held_out: HeldOut, lease: Lease, _version: int) -> None:
            prompt, version = held_out.read(lease)
            group = await play(lease, prompt, held_out.limits, held_out.pool, at_least=version)
            group.evaluates = version
            await held_out.stage.settle(lease, "eval:groups", group)

        async with anyio.create_task_group() as tasks:
            if settings.pacing.late == "cancel":
                tasks.start_soon(late.watch)
            async with anyio.create_task_group() as pumps:
                pumps.start_soon(partial(pump, stage, work, at_once=room, stopping=role.stopping))
                if evaluation is not None:
                    works = partial(evaluate, evaluation)
                    pumps.start_soon(
                        partial(pump, evaluation.stage, works, at_once=evaluation.room, stopping=role.stopping)
                    )
            tasks.cancel_scope.cancel()


def _check_rewards(rewards: tuple[object, ...], factories: dict[str, Factory]) -> None:
    if rewards:
        return
    silent = [name for name, factory in factories.items() if not factory.has_reward]
    if silent:
        raise SettingsError(
            f"environment {silent[0]!r} has no get_reward and there are no [[rewards]]: nothing would measure "
            "a reward; add a reward function"
        )
