"""The command lines of the roles that make up a run on one machine."""

import sys
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from workers.settings import Settings

ENGINE = "engine"
_LIGHT_MODULES = ("workers.cli", "workers.feed.worker", "workers.rollout.worker", "workers.score.worker")
_TORCH_MODULES = ("workers.cli", "workers.local_engine.server", "workers.train.worker")
_HAS_GPU = Path("/dev/nvidiactl").exists()
"""There with NVIDIA's driver. A process that has asked CUDA anything must not be forked, and what imports ask of it is
the affair of many libraries; so trainers and engines are new interpreters there."""
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
    modules: tuple[str, ...] = ()
    """Modules worth importing once for all processes of its kind; empty: always a new interpreter."""
    listen_timeout_s: float = 120.0
    """Seconds within which it must print its address, if it listens."""

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
        RoleSpec(
            role=role,
            index=index,
            command=(*_penstock_command(), role, str(file), *addresses),
            modules=_torch_modules() if role == "train" else _LIGHT_MODULES,
        )
        for role, count in wanted.items()
        for index in range(count)
    ]


def engine_spec(settings: Settings, file: Path, port: int) -> RoleSpec:
    """An engine of our own; port 0 lets the system choose one. Its first line says `listening on URL`."""
    return RoleSpec(
        role=ENGINE,
        command=(*_penstock_command(), "serve", str(file), "--port", str(port)),
        modules=_torch_modules() if settings.engine.server == "local" else (),
        listen_timeout_s=settings.engine.start_timeout_s + _EXTRA_START_S,
    )


def _torch_modules() -> tuple[str, ...]:
    return () if _HAS_GPU else _TORCH_MODULES


def _penstock_command() -> tuple[str, ...]:
    # -P: whatever lies in the working directory, our own packages are the ones that run.
    return (sys.executable, "-P", "-m", "workers")
