"""The engine of an evaluation without a run: started for the evaluation, or an existing one."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import anyio

from stream.durable import write_file_atomically
from stream.errors import EngineUnavailableError, RunFailedError
from workers.engine_api.discovery import EngineDiscovery
from workers.launch.children import ChildProcess
from workers.launch.specs import engine_spec
from workers.rollout.engine_client.sampling import UNVERSIONED
from workers.settings import Settings
from workers.settings.toml_file import dump_settings
from workers.train.publishing.publisher import open_publisher

T = TypeVar("T")

EngineTask = Callable[[str, int], Awaitable[T]]
"""Called with the engine's URL and the version of its weights."""


async def with_started_engine(settings: Settings, policy: Path, use: EngineTask[T], logs: Path | None = None) -> T:
    """Start an engine, push a policy as version 0, use it, and stop it.

    Args:
        settings: settings of a run, which determine the kind of engine.
        policy: folder of the policy.
        use: called with the engine's URL and the policy version.
        logs: folder of the engine's log; default: a temporary folder.

    Raises:
        RunFailedError: the engine exited early; quotes its last error.
    """
    found: list[T] = []
    with TemporaryDirectory(prefix="penstock-eval-") as folder:
        file = Path(folder) / "run.toml"
        await anyio.to_thread.run_sync(write_file_atomically, file, dump_settings(settings).encode())
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
    """Use an existing engine. If a policy is given, push it first, as the version after the engine's current one.

    Raises:
        EngineUnavailableError: the engine does not answer.
    """
    async with open_publisher(settings, EngineDiscovery((url,))) as publisher:
        (has,) = (await publisher.engine_versions()).values()
        if policy is not None:
            has = 0 if has is None else has + 1
            await publisher.push(policy, has)
        elif has is None and not await publisher.any_healthy():
            raise EngineUnavailableError(f"no engine answers at {url}")
    return await use(url, UNVERSIONED if has is None else has)
