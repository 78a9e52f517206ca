"""Runs all checks of the preflight."""

import time
from functools import partial

import anyio
import anyio.to_thread

from workers.run.preflight.chat_check import check_chats
from workers.run.preflight.data_check import check_data
from workers.run.preflight.environment_check import check_environments
from workers.run.preflight.findings import PreflightReport
from workers.run.preflight.machine_check import check_engines, check_machine, check_redis
from workers.run.preflight.model_check import check_model
from workers.run.preflight.reward_check import check_rewards
from workers.settings import Settings


async def run_preflight(settings: Settings) -> PreflightReport:
    """Test everything that a run needs before an engine starts. Calls user code; every call has a deadline."""
    report, started = PreflightReport(), time.monotonic()
    facts = await anyio.to_thread.run_sync(check_model, settings, report)
    prompts = await anyio.to_thread.run_sync(check_data, settings, report)
    await anyio.to_thread.run_sync(check_machine, settings, facts, report)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(check_redis, settings, report)
        tasks.start_soon(check_engines, settings, report)
        environments = await check_environments(settings, prompts, report)
        if facts is not None:
            max_positions = facts.max_positions
            check = partial(check_chats, settings, prompts, environments, max_positions, report)
            await anyio.to_thread.run_sync(check)
        await check_rewards(settings, prompts, environments, report)
    report.seconds = round(time.monotonic() - started, 2)
    return report
