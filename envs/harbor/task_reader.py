"""Reads tasks in Harbor's format from their folders, and refuses by name what Penstock does not do."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from envs.harbor.config import (
    FILE,
    AgentTable,
    ArtifactTable,
    CollectTable,
    EnvironmentTable,
    StepTable,
    TaskError,
    TaskFile,
    User,
    VerifierTable,
)
from envs.harbor.task import (
    ARTIFACTS,
    TESTS,
    VERIFIER_LOGS,
    Reach,
    Task,
    TaskEnvironment,
    TaskStep,
    TaskVerifier,
    selected_files,
)
from envs.sandboxes.contract import Network
from stream.errors import DataError

_NETWORKS: Final = {"no-network": Network.OFF, "public": Network.OPEN, "allowlist": Network.ALLOWLIST}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])B?", re.IGNORECASE)
_MIB: Final = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_CANARY: Final = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)


def task_folders(path: Path) -> list[Path]:
    """Return the folders of tasks in a folder, at any depth, sorted; the folder itself if it is one.

    Raises:
        DataError: there are none.
    """
    folders = sorted(file.parent for file in path.rglob(FILE) if file.is_file())
    if not folders:
        raise DataError(f"{path} has no folder with a {FILE}; name a folder of tasks in Harbor's format")
    return folders


def read_tasks(path: Path) -> Iterator[Task | TaskError]:
    """Read all tasks in a folder; a task that cannot be played yields its error."""
    for folder in task_folders(path):
        try:
            yield read_task(folder)
        except TaskError as error:
            yield error


def read_task(folder: Path) -> Task:
    """Read a task from its folder.

    Raises:
        TaskError: it cannot be read, or needs what Penstock does not do.
    """
    return _TaskReader(folder).read()


class _TaskReader:
    """Reads one task.

    Args:
        folder: of the task.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._file = TaskFile(folder / FILE)
        self._table = self._file.table

    def read(self) -> Task:
        """Return the task."""
        table = self._table
        environment = self._environment(table.environment, "environment", self._folder / "environment")
        if table.steps:
            steps = tuple(self._step(step, position) for position, step in enumerate(table.steps))
            if len({step.name.casefold() for step in steps}) < len(steps):
                raise self._file.error("steps", "two steps have the same name")
        else:
            steps = (self._only_step(),)
        return Task(
            name=str(table.task.get("name") or self._folder.name),
            folder=self._folder,
            environment=environment,
            steps=steps,
            is_final=table.multi_step_reward_strategy == "final",
            solution_env=table.solution.env,
            columns={"package": table.task, "metadata": table.metadata, "source": table.source or ""},
            unknown_keys=self._file.unknown_keys,
        )

    def _environment(self, table: EnvironmentTable, key: str, context: Path) -> TaskEnvironment:
        """Return what a table describes.

        Args:
            table: the description.
            key: of the table in the file.
            context: folder that may hold a Dockerfile.
        """
        self._refuse(table, key)
        compose = context / "docker-compose.yaml"  # by this name alone, as in Harbor
        if compose.exists():
            raise TaskError(compose.name, str(compose), "several containers are not supported")
        if not table.docker_image and not (context / "Dockerfile").is_file():
            raise self._file.error(f"{key}.docker_image", f"it is not set, and {context} has no Dockerfile")
        return TaskEnvironment(
            image=table.docker_image,
            context=None if table.docker_image else context,
            build_timeout_s=table.build_timeout_sec,
            cpus=table.cpus,
            memory_mb=self._size(table.memory_mb, table.memory, f"{key}.memory"),
            disk_mb=self._size(table.storage_mb, table.storage, f"{key}.storage"),
            workdir=table.workdir,
            env=table.env,
            healthcheck=table.healthcheck,
        )

    def _refuse(self, table: EnvironmentTable, key: str) -> None:
        """Raise an error for what the format has and Penstock does not do."""
        if table.os.lower() != "linux":
            raise self._file.error(f"{key}.os", f"{table.os!r}: only linux is supported")
        for name, needed in (
            ("tpu", table.tpu is not None),
            ("gpus", bool(table.gpus)),
            ("mcp_servers", bool(table.mcp_servers)),
            ("skills_dir", bool(table.skills_dir)),
        ):
            if needed:
                raise self._file.error(f"{key}.{name}", "it is not supported")

    def _size(self, megabytes: int | None, text: str | None, key: str) -> int | None:
        """Return a size in MiB, of which the second form is the older one."""
        if text is None:
            return megabytes
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise self._file.error(key, f"{text!r} is no size such as '512M' or '2G'")
        size = int(float(match[1]) * _MIB[match[2].upper()])
        if megabytes not in (None, size):
            raise self._file.error(key, f"it is {size} MB, and {key.rpartition('.')[2]}_mb is {megabytes}")
        return size

    def _only_step(self) -> TaskStep:
        table, folder = self._table, self._folder
        verifier = self._verifier(table.verifier, "verifier", None)
        return TaskStep(
            instruction=self._instruction(folder),
            timeout_s=table.agent.timeout_sec,
            user=_user(table.agent.user),
            reach=self._reach(table.agent, "agent", table.environment, "environment"),
            verifier=verifier,
            tests=() if verifier.has_tests else self._tests(None),
            solution=_folder(folder / "solution"),
        )

    def _step(self, step: StepTable, position: int) -> TaskStep:
        table, key = self._table, f"steps[{position}]"
        if not re.fullmatch(r"[^<>:\"/\\|?*\x00-\x1f\x7f]+", step.name) or step.name.strip(". ") != step.name:
            raise self._file.error(f"{key}.name", f"{step.name!r} is no name of a folder")
        folder = self._folder / "steps" / step.name
        agent = step.agent if step.agent.network_mode else table.agent
        limits = step.min_reward
        verifier = self._verifier(table.verifier, f"{key}.verifier", step)
        return TaskStep(
            name=step.name,
            instruction=self._instruction(folder),
            timeout_s=step.agent.timeout_sec or table.agent.timeout_sec,
            user=_user(step.agent.user if step.agent.user is not None else table.agent.user),
            reach=self._reach(agent, f"{key}.agent", table.environment, "environment"),
            verifier=verifier,
            tests=() if verifier.has_tests else self._tests(step),
            solution=_folder(folder / "solution") or _folder(self._folder / "solution"),
            workdir=_folder(folder / "workdir"),
            healthcheck=step.healthcheck,
            min_reward=limits if isinstance(limits, dict) else {} if limits is None else {"reward": limits},
        )

    def _instruction(self, folder: Path) -> str:
        """Return the instruction, without the lines that mark it as part of a benchmark."""
        if (folder / "trajectory.json").exists():
            raise TaskError("trajectory.json", str(folder / "trajectory.json"), "an earlier conversation is not given")
        try:
            lines = (folder / "instruction.md").read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError("instruction.md", str(folder / "instruction.md"), f"it cannot be read: {error}") from error
        first = next((n for n, line in enumerate(lines) if not _CANARY.match(line.strip())), len(lines))
        return "".join(lines[first:] if first else lines).strip("\n" if first else "")

    def _verifier(self, table: VerifierTable, key: str, step: StepTable | None) -> TaskVerifier:
        own = table if step is None else step.verifier
        separate, has_tests = self._separate(table, step)
        environment = (separate is not None and (own.environment or table.environment)) or self._table.environment
        artifacts = [*self._table.artifacts, *(step.artifacts if step is not None else ())]
        user = own.user if own.user is not None else table.user
        return TaskVerifier(
            timeout_s=own.timeout_sec,
            user=_user(user),
            env={**table.env, **own.env},
            reach=self._reach(own if own.network_mode else table, key, environment, f"{key}.environment"),
            separate=separate,
            has_tests=has_tests,
            collect=self._collect([*table.collect, *(own.collect if step is not None else ())], key),
            artifacts=self._artifacts(artifacts),
        )

    def _separate(self, table: VerifierTable, step: StepTable | None) -> tuple[TaskEnvironment | None, bool]:
        """Return the verifier's own environment, as Harbor resolves it, and whether its image has the tests.

        An explicit mode decides, else an environment means `separate`; a step goes before the task. None: shared mode.
        """
        tables = [table] if step is None else [step.verifier, table]
        modes = [each.environment_mode or ("separate" if each.environment else None) for each in tables]
        for each in tables:
            if each.environment_mode == "shared" and each.environment is not None:
                raise self._file.error("verifier.environment", "it conflicts with environment_mode = 'shared'")
        if next((mode for mode in modes if mode), "shared") == "shared":
            return None, False
        given = next((each.environment for each in tables if each.environment), None) or self._table.environment
        image, context = self._table.environment.docker_image, self._folder / "environment"
        has_tests = False
        for each, folder in zip(tables, reversed(self._test_folders(step)), strict=True):
            own_image = each.environment.docker_image if each.environment else ""
            if own_image or (folder / "Dockerfile").is_file():
                image, context, has_tests = own_image, folder, True
                break
        own = msgspec.structs.replace(given, docker_image=image)
        return self._environment(own, "verifier.environment", context), has_tests

    def _test_folders(self, step: StepTable | None) -> list[Path]:
        return [self._folder / "tests", *([self._folder / "steps" / step.name / "tests"] if step else [])]

    def _tests(self, step: StepTable | None) -> tuple[Path, ...]:
        """Return the folders of tests, one of which has to have `test.sh`."""
        folders = self._test_folders(step)
        existing = tuple(folder for folder in folders if folder.is_dir())
        if not any("test.sh" in selected_files(self._folder, folder) for folder in existing):
            raise TaskError("test.sh", str(folders[-1] / "test.sh"), "it does not exist, or .harborignore excludes it")
        return existing

    def _reach(
        self, phase: AgentTable | VerifierTable, key: str, environment: EnvironmentTable, environment_key: str
    ) -> Reach:
        """Return what a phase reaches: by its own setting, or its environment's, which in Harbor is everything."""
        mode, hosts = phase.network_mode, phase.allowed_hosts
        if mode is None:
            if hosts:
                raise self._file.error(f"{key}.allowed_hosts", "it needs network_mode = 'allowlist'")
            key, mode, hosts = environment_key, environment.network_mode, environment.allowed_hosts
        if mode is None:
            mode = "no-network" if environment.allow_internet is False else "public"
        if hosts and mode != "allowlist":
            raise self._file.error(f"{key}.allowed_hosts", "it needs network_mode = 'allowlist'")
        return Reach(_NETWORKS[mode], tuple(host.strip().lower().rstrip(".") for host in hosts or ()))

    def _collect(self, hooks: Sequence[CollectTable], key: str) -> tuple[CollectTable, ...]:
        for position, hook in enumerate(hooks):
            if hook.service != "main":
                raise self._file.error(f"{key}.collect[{position}].service", "several containers are not supported")
        return tuple(hooks)

    def _artifacts(self, entries: Sequence[str | ArtifactTable]) -> tuple[ArtifactTable, ...]:
        """Return what a separate verifier gets, `/logs/artifacts` always first."""
        artifacts = [ArtifactTable(source=entry) if isinstance(entry, str) else entry for entry in entries]
        for artifact in artifacts:
            source = PurePosixPath(artifact.source)
            if artifact.service != "main":
                raise self._file.error("artifacts.service", "several containers are not supported")
            if not source.is_absolute() or ".." in source.parts:
                raise self._file.error(
                    "artifacts.source", f"{artifact.source!r}: an absolute path without .. is needed"
                )
            if any(_overlap(source, PurePosixPath(folder)) for folder in (VERIFIER_LOGS, TESTS)):
                raise self._file.error("artifacts.source", f"{artifact.source!r} holds the reward, or the tests")
        if not any(PurePosixPath(artifact.source) == PurePosixPath(ARTIFACTS) for artifact in artifacts):
            artifacts.insert(0, ArtifactTable(source=ARTIFACTS))
        return tuple(artifacts)


def _overlap(path: PurePosixPath, other: PurePosixPath) -> bool:
    return path.is_relative_to(other) or other.is_relative_to(path)


def _user(user: User) -> str:
    return "" if user is None else str(user)


def _folder(path: Path) -> Path | None:
    return path if path.is_dir() else None
