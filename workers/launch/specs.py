"""Process specs of the roles and engines of a run on one machine."""

import json
import sys
from pathlib import Path

from msgspec import Struct

from workers.role.memory import BUDGET
from workers.settings import Settings
from workers.settings.secrets import without_secrets

ENGINE = "engine"
DASHBOARD = "dashboard"
_PENSTOCK = ("-P", "-m", "penstock")  # -P: packages in the working directory must not hide Penstock's
COMMANDS: dict[str, tuple[str, ...]] = {
    "feed": (*_PENSTOCK, "feed"),
    "rollout": (*_PENSTOCK, "rollout"),
    "score": (*_PENSTOCK, "score"),
    "train": (*_PENSTOCK, "train"),
    ENGINE: (*_PENSTOCK, "serve"),
    DASHBOARD: (*_PENSTOCK, "dashboard"),
}
"""Python's arguments that start each kind of process; the arguments of `role_specs`, `engine_spec` or `dashboard_spec`
follow. Tests and benchmarks put programs of their own here."""
_EXTRA_START_S = 30.0
"""Seconds beyond `engine.start_timeout_s`, so that a slow engine can report the timeout itself."""


class ProcessSpec(Struct, frozen=True, kw_only=True):
    """Specification of one process that the supervisor keeps running."""

    role: str
    """`feed`, `rollout`, `score`, `train`, `engine`, or `dashboard`."""
    index: int = 0
    command: tuple[str, ...]
    environment: dict[str, str] = {}
    """Environment variables added to the supervisor's environment."""
    listen_timeout_s: float = 120.0
    """Seconds within which a server must announce its URL."""

    @property
    def name(self) -> str:
        """Name of the process, for example `rollout-0`."""
        return f"{self.role}-{self.index}"


def role_specs(
    settings: Settings, file: Path, redis: str, engines: tuple[str, ...], trainer_memory: str = ""
) -> list[ProcessSpec]:
    """Return the specs of all roles except engines; `trainer_memory` is the trainer's `BUDGET`.

    A command line contains the Redis URL only if the settings file does not: the URL may contain a password, and every
    user of the machine can read command lines.
    """
    wanted = {"feed": 1, "rollout": settings.rollout.workers, "score": settings.score.workers, "train": 1}
    server = ("--redis", redis) if redis != settings.run.redis else ()
    addresses = (*server, *(part for url in engines for part in ("--engine", url)))
    specs: list[ProcessSpec] = []
    for role, count in wanted.items():
        for index in range(count):
            metrics_address = _metrics_address(settings, len(specs) + 1)
            overrides: tuple[str, ...] = ()
            if metrics_address:
                overrides = ("--set", f"run.metrics_address={json.dumps(metrics_address)}")
            if settings.publishes_adapters and role in {"rollout", "train"}:
                # With the URLs of engines alone they could not tell that the run has started these.
                overrides += ("--set", "weights.transport=adapter")
            specs.append(
                ProcessSpec(
                    role=role,
                    index=index,
                    command=(sys.executable, *COMMANDS[role], str(file), *addresses, *overrides),
                    environment={BUDGET: trainer_memory} if role == "train" and trainer_memory else {},
                )
            )
    return specs


def _metrics_address(settings: Settings, offset: int) -> str:
    """Return where a process serves metrics: the supervisor has the first port, the others follow; 0 stays 0."""
    if not settings.run.metrics_address:
        return ""
    host, _, _ = settings.run.metrics_address.rpartition(":")
    port = settings.run.metrics_port
    return f"{host}:{port + offset if port else 0}"


def engine_spec(settings: Settings, file: Path, port: int) -> ProcessSpec:
    """Return the spec of an engine that this run starts; port 0: any free port. It announces `listening on URL`."""
    return ProcessSpec(
        role=ENGINE,
        command=(sys.executable, *COMMANDS[ENGINE], str(file), "--port", str(port)),
        listen_timeout_s=settings.engine.start_timeout_s + _EXTRA_START_S,
    )


def dashboard_spec(settings: Settings) -> ProcessSpec:
    """Return the spec of the run's dashboard, for this machine. It announces `listening on URL`."""
    port = settings.run.dashboard if isinstance(settings.run.dashboard, int) else 0
    return ProcessSpec(
        role=DASHBOARD,
        command=(sys.executable, *COMMANDS[DASHBOARD], str(settings.folder), "--port", str(port)),
        environment=without_secrets(),
    )


def penstock_command() -> tuple[str, ...]:
    """Return the beginning of a command line of `penstock`."""
    return (sys.executable, *_PENSTOCK)
