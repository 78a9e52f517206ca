"""A chaos run with every role a real process, behind one proxy to the engine and one to Redis."""

from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import anyio
from msgspec.structs import replace

from stream.connection.run_connection import connect
from stream.errors import PenstockError
from stream.operator.status import read_status
from tests.chaos import project
from tests.chaos.audit import Verdict, audit
from tests.faults import patient_rollout
from tests.faults.proxy import Plan, Proxy, address_of
from workers.launch import supervisor
from workers.launch.specs import ProcessSpec, role_specs
from workers.launch.supervisor import RunOutcome, Supervisor
from workers.role import log_setup as logs
from workers.runs import live_run
from workers.runs.folder import lock_folder, write_settings
from workers.settings import Settings
from workers.settings.toml_file import load_settings
from workers.terminal.progress import SilentDisplay

_REQUEST_TIMEOUT_S = 2.0


@dataclass(kw_only=True)
class Journey:
    """One run: its settings, its proxies and, in the end, its outcome."""

    settings: Settings
    engine: Proxy
    redis: Proxy
    outcome: RunOutcome | None = None

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.settings.folder

    @property
    def verdict(self) -> Verdict:
        """Where the prompts ended. Needs a running server; must not be called on an event loop."""
        return audit(self.folder, len(Path(self.settings.data.path).read_text().splitlines()))

    @property
    def logs(self) -> str:
        """The end of every log, for the message of a failing test."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in self.folder.glob("logs/*.log"))

    def told(self, event: str) -> int:
        """Count how often any process logged `event`."""
        return sum(path.read_text().count(f'"event": "{event}"') for path in self.folder.glob("logs/*.log"))

    async def ended(self, prompts: int) -> None:
        """Wait until `prompts` prompts have ended."""
        while (here := await anyio.to_thread.run_sync(live_run.read_live, self.folder)) is None or not here.engines:
            await anyio.sleep(0.05)
        async with connect(here.redis, here.run, create=False) as connection:
            while True:
                try:
                    counts = (await read_status(connection)).prompt_counts
                except PenstockError:  # no role has started
                    await anyio.sleep(0.05)
                    continue
                if counts["trained"] + counts["dropped"] + counts["dead"] >= prompts:
                    return
                await connection.wait_for_change("$", 1.0)


def begin(folder: Path, groups: int, *, redis: str = "", reconnect_s: float = 60.0) -> Settings:
    """Write a project with a short request timeout; `redis` is the URL of an existing server."""
    settings = project.write_project(folder.resolve(), groups, seed=1)
    (settings.folder / "logs").mkdir(parents=True)
    return replace(
        settings,
        run=replace(settings.run, redis=redis),
        engine=replace(settings.engine, request_timeout_s=_REQUEST_TIMEOUT_S),
        queue=replace(settings.queue, reconnect_timeout_s=reconnect_s),
    )


def again(folder: Path) -> Settings:
    """Return the settings of the run that was begun in `folder`."""
    return load_settings(folder / "run" / "run.toml")


PATIENT = (str(patient_rollout.__file__), "rollout")
"""A rollout worker that repeats a request until it succeeds."""


def travel(
    settings: Settings,
    *,
    on_engine: Plan | None = None,
    on_redis: Plan | None = None,
    during: Callable[[Journey], Awaitable[None]] | None = None,
    train: tuple[str, ...] = project.WITNESS,
    limit_s: float,
) -> Journey:
    """Run to the end, with these fault plans for the connections.

    The supervisor connects directly: it only reads.

    Args:
        settings: settings of the run.
        on_engine: faults on answers of the engine.
        on_redis: faults on answers of Redis.
        during: runs beside the supervisor.
        train: Python's arguments that start the trainer.
        limit_s: seconds until the run counts as hanging.
    """
    journeys: list[Journey] = []

    async def main() -> None:
        async with _proxies() as (engine, redis):
            engine.plan, redis.plan = on_engine or engine.plan, on_redis or redis.plan
            journey = Journey(settings=settings, engine=engine, redis=redis)
            journeys.append(journey)

            def behind_proxies(
                settings: Settings, file: Path, server: str, engines: tuple[str, ...]
            ) -> list[ProcessSpec]:
                redis.upstream = address_of(server)
                if engines:  # none yet while the supervisor preloads the roles' modules
                    engine.upstream = address_of(engines[0])
                return role_specs(settings, file, redis.url("redis"), (engine.url("http"),))

            with anyio.fail_after(limit_s):
                async with anyio.create_task_group() as tasks:
                    if during is not None:
                        tasks.start_soon(during, journey)
                    with (
                        project.commands(settings, rollout=PATIENT, train=train),
                        patch.object(supervisor, "role_specs", behind_proxies),
                    ):
                        journey.outcome = await Supervisor(settings, file, SilentDisplay()).run()
                    tasks.cancel_scope.cancel()

    with logs.log_to_file("faults", settings.folder / "logs" / "supervisor.log"), lock_folder(settings.folder):
        file = write_settings(settings)
        anyio.run(main)
    return journeys[0]


@asynccontextmanager
async def _proxies():
    async with Proxy() as engine, Proxy(seed=1) as redis:
        yield engine, redis
