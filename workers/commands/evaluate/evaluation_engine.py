"""The engine that an evaluation without a run samples from: one of its own for as long as it takes, or a given one."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import anyio

from stream.errors import EngineUnavailableError, RunFailedError
from workers.engine_api.discovery.discovery import EngineDiscovery
from workers.rollout.engine_client.sampled_turn import UNVERSIONED
from workers.run.child_process import ChildProcess
from workers.run.role_specs import engine_spec
from workers.run.run_folder import write_atomically
from workers.settings import Settings
from workers.settings.toml_file import dump_settings
from workers.train.publishing.publisher import open_publisher

T = TypeVar("T")

EngineTask = Callable[[str, int], Awaitable[T]]
"""From the engine's URL, and the version that it has, to whatever comes of it."""


async def with_started_engine(settings: Settings, policy: Path, use: EngineTask[T], logs: Path | None = None) -> T:
    """Start an engine, give it a policy as version 0, and use it; it is gone when this returns.

    Args:
        settings: of the run whose engine it is to be like.
        policy: the folder of the policy.
        use: what to do with it.
        logs: folder of its log; a temporary one unless given.

    Raises:
        RunFailedError: it ended; quotes what it said last.
    """
    found: list[T] = []
    with TemporaryDirectory(prefix="penstock-eval-") as folder:
        file = Path(folder) / "run.toml"
        await anyio.to_thread.run_sync(write_atomically, file, dump_settings(settings).encode())
        child = ChildProcess(engine_spec(settings, file, 0), logs or Path(folder))
        async with anyio.create_task_group() as tasks:

            async def use_engine(url: str) -> None:
                async with open_publisher(settings, EngineDiscovery((url,))) as publisher:
                    await publisher.push(policy, 0)
                found.append(await use(url, 0))
                child.terminate()

            def on_url(url: str) -> None:
                tasks.start_soon(use_engine, url)

            code = await child.run(on_url)
            if not found:
                words = await anyio.to_thread.run_sync(child.last_error)
                where = f" (its log is {child.log_file})" if logs else ""
                raise RunFailedError(f"the engine ended with code {code}: {words}{where}")
    return found[0]


async def with_existing_engine(settings: Settings, url: str, policy: Path | None, use: EngineTask[T]) -> T:
    """Use an engine that is there: as it is, or with a policy pushed to it under the number after the one it has.

    Raises:
        EngineUnavailableError: it does not answer.
    """
    async with open_publisher(settings, EngineDiscovery((url,))) as publisher:
        (has,) = (await publisher.engine_versions()).values()
        if policy is not None:
            has = 0 if has is None else has + 1
            await publisher.push(policy, has)
        elif has is None and not await publisher.any_healthy():
            raise EngineUnavailableError(f"no engine answers at {url}")
    return await use(url, UNVERSIONED if has is None else has)
