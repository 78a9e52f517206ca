"""Harbor's `task.toml` as plain data: schema 1.0 to 1.4, each error with its key and its line.

Keys that the schema has and Penstock cannot do are refused by name; keys that it does not have are listed.
"""

import re
import tomllib
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, field

from stream.errors import DataError

FILE: Final = "task.toml"
MAJOR_VERSION: Final = "1"

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(gt=0)]
NetworkMode = Literal["no-network", "public", "allowlist"]
User = str | int | None
_ANY: Final = -1


class TaskError(DataError):
    """A task cannot be read, or needs what Penstock does not do.

    Args:
        name: what is wrong, the same for all tasks that have it: a key or a file.
        place: file and line.
        why: the reason, and the remedy if there is one.
    """

    def __init__(self, name: str, place: str, why: str) -> None:
        super().__init__(f"{place}: {name}: {why}")
        self.name = name


class HealthcheckTable(Struct, frozen=True):
    """`[environment.healthcheck]`: a command that succeeds once everything in the sandbox is ready."""

    command: str
    interval_sec: NonNegative = 5.0
    timeout_sec: Positive = 30.0
    start_period_sec: NonNegative = 0.0
    """Failures within it do not count."""
    start_interval_sec: NonNegative = 5.0
    retries: PositiveInt = 3


class EnvironmentTable(Struct, frozen=True):
    """`[environment]` or `[verifier.environment]`."""

    build_timeout_sec: Positive = 600.0
    docker_image: str = ""
    os: str = "linux"
    cpus: Positive | None = None
    memory_mb: PositiveInt | None = None
    memory: str | None = None
    storage_mb: PositiveInt | None = None
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: Any = None
    mcp_servers: list[Any] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: HealthcheckTable | None = None
    workdir: str = ""
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None


class AgentTable(Struct, frozen=True):
    """`[agent]`."""

    timeout_sec: Positive | None = None
    user: User = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class CollectTable(Struct, frozen=True):
    """`[[verifier.collect]]`: a command that writes what artifacts then carry to the verifier."""

    command: str
    service: str = "main"
    timeout_sec: Positive = 60.0
    user: User = None


class VerifierTable(Struct, frozen=True):
    """`[verifier]`."""

    timeout_sec: Positive = 600.0
    env: dict[str, str] = field(default_factory=dict)
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[CollectTable] = field(default_factory=list)
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class ArtifactTable(Struct, frozen=True):
    """An entry of `artifacts`."""

    source: str
    destination: str | None = None
    exclude: list[str] = field(default_factory=list)
    service: str = "main"


class StepTable(Struct, frozen=True):
    """`[[steps]]`."""

    name: str
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckTable | None = None
    artifacts: list[str | ArtifactTable] = field(default_factory=list)


class SolutionTable(Struct, frozen=True):
    """`[solution]`."""

    env: dict[str, str] = field(default_factory=dict)


class TaskTable(Struct, frozen=True):
    """All of `task.toml`."""

    schema_version: str | None = None
    version: str | None = None
    task: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    steps: list[StepTable] = field(default_factory=list)
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: list[str | ArtifactTable] = field(default_factory=list)


class TaskFile:
    """A `task.toml` that was read.

    Args:
        path: of the file.

    Attributes:
        table: its content.
        unknown_keys: what it has and the schema does not; not read.

    Raises:
        TaskError: it is missing, no TOML, or a value has the wrong type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._text = path.read_text(encoding="utf-8")
            values = tomllib.loads(self._text)
        except (OSError, ValueError) as error:  # broken TOML and UTF-8 are ValueErrors
            raise TaskError(FILE, str(path), f"it cannot be read: {error}") from error
        try:
            self.table = msgspec.convert(values, TaskTable)
        except msgspec.ValidationError as error:
            why, _, key = str(error).partition(" - at `$.")
            raise self.error(key.rstrip("`"), why) from error
        self.unknown_keys = tuple(_unknown_keys(values, TaskTable))
        version = self.table.schema_version or self.table.version or MAJOR_VERSION
        if version.partition(".")[0] != MAJOR_VERSION:
            key = "schema_version" if self.table.schema_version else "version"
            raise self.error(key, f"{version!r} is not read; 1.0 to 1.4 are")

    def error(self, key: str, why: str) -> TaskError:
        """Return the error for a key, such as `steps[1].agent.user`."""
        line = _line_of(self._text, _components(key))
        return TaskError(re.sub(r"\[[\d.]*\]", "", key) or FILE, f"{self.path}:{line}", why)


def _components(key: str) -> list[str | int]:
    """Return `steps[1].name` as its components; `steps[...]`, which msgspec writes, is any of them."""
    parts = re.findall(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)", key)
    return [name or (_ANY if index == "..." else int(index)) for index, name in parts]


def _line_of(text: str, wanted: list[str | int]) -> int:
    """Return the line at which a key stands, or the closest table around it."""
    table: list[str | int] = []
    counts: dict[str, int] = {}
    place: list[str | int]
    best, best_line = 0, 1
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.\"' -]+?)\s*\]", line):
            names = re.findall(r"[^.\"'\s]+", header[2])
            if header[1] == "[[":
                counts[header[2]] = counts.get(header[2], -1) + 1
            table = []
            for position, name in enumerate(names):
                table.append(name)
                if (array := ".".join(names[: position + 1])) in counts:
                    table.append(counts[array])
            place = table
        elif key := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            place = [*table, *re.findall(r"[^.\"']+", key[1])]
        else:
            continue
        place = place[: len(wanted)]
        if best < len(place) and all(want in (part, _ANY) for part, want in zip(place, wanted, strict=False)):
            best, best_line = len(place), number
    return best_line


def _unknown_keys(values: dict[str, Any], kind: type[Struct], place: str = "") -> list[str]:
    """Return the keys of a table, and of the tables in it, that its type does not have."""
    hints = get_type_hints(kind)
    unknown: list[str] = []
    for key, value in values.items():
        if key not in hints:
            unknown.append(f"{place}{key}")
        elif nested := _table_type(hints[key]):
            for entry in value if isinstance(value, list) else [value]:
                if isinstance(entry, dict):
                    unknown += _unknown_keys(entry, nested, f"{place}{key}.")
    return unknown


def _table_type(hint: Any) -> type[Struct] | None:
    """Return the table of a field's type, if it has one: itself, in a list, or one of several."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    if get_origin(hint) in (list, Union, UnionType):
        return next((found for part in get_args(hint) if (found := _table_type(part))), None)
    return None
