"""A run whose roles reach the engine and Redis through one proxy each, so that their connections can fail."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from msgspec.structs import replace

from stream.connection.run_connection import RunConnection
from tests.soak.audit import Verdict, audit
from tests.soak.project import ROLE_PROGRAM, write_project
from tests.soak.proxy import Plan, Proxy, address_of
from tests.soak.run import log_ends, supervise, wait_ended
from workers.launch import supervisor
from workers.launch.specs import ProcessSpec, role_specs
from workers.launch.supervisor import RunOutcome
from workers.settings import Settings
from workers.settings.toml_file import load_settings

_REQUEST_TIMEOUT_S = 2.0


@dataclass(kw_only=True)
class Journey:
    """One run: its settings, its proxies and, in the end, its outcome."""

    settings: Settings
    engine: Proxy = field(init=False)
    redis: Proxy = field(init=False)
    connection: RunConnection = field(init=False)
    """Past the proxies, as the supervisor's."""
    outcome: RunOutcome = field(init=False)

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
        return log_ends(self.folder)

    async def ended(self, prompts: int) -> None:
        """Wait until `prompts` prompts have ended."""
        await wait_ended(self.connection, prompts)


def begin(folder: Path, groups: int, *, redis: str = "", reconnect_s: float = 60.0) -> Settings:
    """Write a project with a short request timeout; `redis` is the URL of an existing server."""
    settings = write_project(folder.resolve(), groups, run={"redis": redis}, queue={"reconnect_timeout_s": reconnect_s})
    settings.folder.mkdir()
    return replace(settings, engine=replace(settings.engine, request_timeout_s=_REQUEST_TIMEOUT_S))


def again(folder: Path) -> Settings:
    """Return the settings of the run that was begun in `folder`."""
    return load_settings(folder / "run" / "run.toml")


def travel(
    settings: Settings,
    *,
    on_engine: Plan | None = None,
    on_redis: Plan | None = None,
    during: Callable[[Journey], Awaitable[None]] | None = None,
    learner: str = "Witness",
    limit_s: float,
) -> Journey:
    """Run to the end, with these fault plans for the connections; rollout workers repeat a request until it succeeds.

    The supervisor connects directly: it only reads.

    Args:
        settings: settings of the run.
        on_engine: faults on answers of the engine.
        on_redis: faults on answers of Redis.
        during: runs beside the supervisor.
        learner: class of the trainer's learner, of `witness.py`.
        limit_s: seconds until the run counts as hanging.
    """
    journey = Journey(settings=settings)

    def behind_proxies(
        settings: Settings, file: Path, server: str, engines: tuple[str, ...], memory: str
    ) -> list[ProcessSpec]:
        journey.redis.upstream = address_of(server)
        if engines:  # none yet while the supervisor preloads the roles' modules
            journey.engine.upstream = address_of(engines[0])
        return role_specs(settings, file, journey.redis.url("redis"), (journey.engine.url("http"),), memory)

    @asynccontextmanager
    async def proxies() -> AsyncIterator[None]:
        async with Proxy() as journey.engine, Proxy(seed=1) as journey.redis:
            journey.engine.plan = on_engine or journey.engine.plan
            journey.redis.plan = on_redis or journey.redis.plan
            with patch.object(supervisor, "role_specs", behind_proxies):
                yield

    async def beside(connection: RunConnection) -> None:
        journey.connection = connection
        if during is not None:
            await during(journey)

    train = (ROLE_PROGRAM, "train", "--learner", learner)
    rollout = (ROLE_PROGRAM, "rollout", "--patient")
    outcome = supervise(settings, beside, limit_s=limit_s, inside=proxies(), train=train, rollout=rollout)
    assert outcome is not None, f"the run did not come to its end in {limit_s:g} s\n{journey.logs}"
    journey.outcome = outcome
    return journey
