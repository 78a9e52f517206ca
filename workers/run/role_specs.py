"""The command lines of the roles that make up a run on one machine."""

import sys
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from workers.settings import Settings

ENGINE = "engine"
_EXTRA_START_S = 30.0
"""For an engine that did not start in time to say so itself."""


class RoleSpec(Struct, frozen=True, kw_only=True):
    """One process to keep running."""

    role: str
    """`feed`, `rollout`, `score`, `train`, or `engine`."""
    index: int = 0
    command: tuple[str, ...]
    environment: dict[str, str] = {}
    """Besides ours."""
    listen_timeout_s: float = 120.0
    """Where it says where it listens: within so many seconds."""

    @property
    def name(self) -> str:
        """What people call it: `rollout-0`."""
        return f"{self.role}-{self.index}"


MakeRoleSpecs = Callable[[Settings, Path, str, tuple[str, ...]], list[RoleSpec]]
"""(settings, settings file, server's URL, engines' URLs) -> every role but the engine."""
MakeEngineSpec = Callable[[Settings, Path, int], RoleSpec]
"""(settings, settings file, port) -> an engine."""


def role_specs(settings: Settings, file: Path, redis: str, engines: tuple[str, ...]) -> list[RoleSpec]:
    """Every role but the engine, with the settings file and the addresses that it needs.

    The server's URL is named only where the file does not: it may bear a password, and anybody may read command lines.
    """
    wanted = {"feed": 1, "rollout": settings.rollout.workers, "score": settings.score.workers, "train": 1}
    server = ("--redis", redis) if redis != settings.run.redis else ()
    addresses = (*server, *(part for url in engines for part in ("--engine", url)))
    return [
        RoleSpec(role=role, index=index, command=(*_penstock_command(), role, str(file), *addresses))
        for role, count in wanted.items()
        for index in range(count)
    ]


def engine_spec(settings: Settings, file: Path, port: int) -> RoleSpec:
    """An engine of our own; port 0 lets the system choose one. Its first line says `listening on URL`."""
    return RoleSpec(
        role=ENGINE,
        command=(*_penstock_command(), "serve", str(file), "--port", str(port)),
        listen_timeout_s=settings.engine.start_timeout_s + _EXTRA_START_S,
    )


def _penstock_command() -> tuple[str, ...]:
    # -P: whatever lies in the working directory, our own packages are the ones that run.
    return (sys.executable, "-P", "-m", "workers")
