"""Rollout workers with sandboxes and without a model, as processes that tests kill: `sandbox_worker.py OPTIONS`.

Each line on standard input starts one worker, as a fork of this process; its pid is the answer. The workers claim
prompts, roll them out with a scripted model, and complete them, with the very code of a rollout worker. With `unowned`
their sandboxes have no record and no reaper: removal is in a `finally`, as in most clients.
"""

import json
import os
import random
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from envs.factory import EnvironmentFactory
from envs.sandboxes.contract import EpisodeSandboxes, SandboxSpec
from stream.connection.run_connection import connect
from stream.queue.lease import Lease
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Prompt
from workers.check.scripted import Call, ScriptedSampler, scripted_chat
from workers.role.work_loop import work_loop
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.engine_client.sampling import SampledTurn, SamplingOptions
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.sandbox_host import SandboxHost, SandboxOwner
from workers.rollout.sandbox_reaper import SandboxReaper
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import RolloutSettings, SandboxSettings

GROUP_SIZE, GROUPS = 2, 4


class Boxed:
    """Writes into its sandbox, takes a snapshot, and opens another one for its reward."""

    async def reset(self, sandboxes: EpisodeSandboxes) -> None:
        self.sandboxes = sandboxes
        self.sandbox = await sandboxes.open(SandboxSpec(memory_mb=64, disk_mb=64, max_life_s=600), purpose="agent")

    async def work(self, n: int) -> str:
        """Do something.

        Args:
            n: A number.
        """
        await self.sandbox.exec(["sleep", f"{0.1 * random.random():.3f}"], timeout_s=5)
        await self.sandbox.write({f"{n}": b"x"})
        return "done"

    async def get_reward(self) -> float:
        verifier = await self.sandboxes.open(SandboxSpec(memory_mb=64, disk_mb=64), purpose="verifier")
        await verifier.write({"1": await self.sandbox.read("1", 10)})
        await self.sandboxes.close(verifier)
        return 1.0


async def work(options: dict[str, Any]) -> None:
    """Work until the run has finished."""
    random.seed(os.getpid())
    consumer = f"rollout-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    settings = SandboxSettings(**options["sandboxes"])
    lease_s = float(options["lease_s"])
    async with (
        connect(options["redis"], options["run"], reconnect_s=60.0) as connection,
        SandboxHost.open(settings, None if options["unowned"] else connection) as host,
        EnvironmentPool(
            {"box": (factory := EnvironmentFactory.from_callable(Boxed))}, size=GROUPS * GROUP_SIZE
        ) as pool,
        anyio.create_task_group() as background,
    ):
        stage = Stage(
            connection, "prompts", consumer, RetryPolicy(lease_s=lease_s, infra_attempts=10_000, backoff_s=0.05)
        )
        runner = GroupRunner(
            chats={"box": ChatSetup(scripted_chat(), TOOL_FORMATS["hermes"])},
            sampler=TwoTurns(),
            pool=pool,
            limits=RolloutSettings(),
            factories={"box": factory},
            sandboxes=host,
        )
        reaper = None
        if host.place is not None:
            reaper = SandboxReaper(host, host.place, consumer, lease_s)
            background.start_soon(reaper.run)

        async def roll_out(lease: Lease, _version: int) -> None:
            prompt = Prompt(
                id=lease.prompt_id,
                messages=[{"role": "user", "content": "?"}],
                environment="box",
                group_size=GROUP_SIZE,
            )
            owner = None if options["unowned"] else SandboxOwner(stage, lease)
            group = await runner.run(prompt, owner=owner)
            await stage.complete(lease, "groups", group)

        stopping = anyio.Event()
        await work_loop(stage, roll_out, concurrency=GROUPS, stopping=stopping)
        background.cancel_scope.cancel()
        if reaper is not None:
            with anyio.CancelScope(shield=True):
                await reaper.finish()


class TwoTurns:
    """A model that calls the tool once, and then says nothing."""

    context_length = 0

    async def sample(
        self, prompt_ids: Sequence[int], sampling: SamplingOptions, *, min_policy_version: int = 0
    ) -> SampledTurn:
        """See `Sampler.sample`."""
        await anyio.sleep(0.1 * random.random())
        is_first = scripted_chat().decode(prompt_ids).count("assistant") < 2
        script = ScriptedSampler([str(Call("work", {"n": 1}))] if is_first else [])
        return await script.sample(prompt_ids, sampling, min_policy_version=min_policy_version)


def main(options: dict[str, Any]) -> None:
    """Fork a worker for each line, until the input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            log = os.open(options["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                anyio.run(work, options)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
