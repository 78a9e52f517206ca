"""A task of Harbor's format as it is played: its steps, what their sandboxes are made of, and what verifies them.

A task of one instruction has one step without a name.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from envs.harbor.config import ArtifactTable, CollectTable, HealthcheckTable, TaskError
from envs.references import import_extra
from envs.sandboxes.contract import Network

LOGS: Final = "/logs"
VERIFIER_LOGS: Final = "/logs/verifier"
ARTIFACTS: Final = "/logs/artifacts"
TESTS: Final = "/tests"
SOLUTION: Final = "/solution"

IGNORE_FILE: Final = ".harborignore"


class Reach(Struct, frozen=True):
    """What a phase of a task asks to reach."""

    network: Network
    hosts: tuple[str, ...] = ()


class TaskEnvironment(Struct, frozen=True, kw_only=True):
    """What a sandbox of the task is made of."""

    image: str = ""
    """Name of an image; empty: it is built from `context`."""
    context: Path | None = None
    """Folder with a Dockerfile."""
    build_timeout_s: float
    cpus: float | None
    memory_mb: int | None
    disk_mb: int | None
    workdir: str
    env: dict[str, str]
    healthcheck: HealthcheckTable | None


class TaskVerifier(Struct, frozen=True, kw_only=True):
    """How a step is verified."""

    timeout_s: float
    user: str
    env: dict[str, str]
    reach: Reach
    separate: TaskEnvironment | None
    """The verifier's own environment; None: the policy's files are verified in a fresh sandbox (shared mode)."""
    has_tests: bool = False
    """The verifier's own image has its tests."""
    collect: tuple[CollectTable, ...] = ()
    artifacts: tuple[ArtifactTable, ...] = ()


class TaskStep(Struct, frozen=True, kw_only=True):
    """One instruction of a task, and its verifier."""

    name: str = ""
    instruction: str
    timeout_s: float | None
    """Deadline of the policy; None: the run's."""
    user: str
    reach: Reach
    verifier: TaskVerifier
    tests: tuple[Path, ...]
    """Folders that become `/tests`; a later one's files replace an earlier one's."""
    solution: Path | None = None
    """Folder that becomes `/solution`, for `check` alone."""
    workdir: Path | None = None
    """Folder whose files are put into the working folder when the step begins; its `setup.sh` runs then."""
    healthcheck: HealthcheckTable | None = None
    min_reward: dict[str, float] = {}
    """Values below which no further step is played."""


class Task(Struct, frozen=True, kw_only=True):
    """A task that can be played."""

    name: str
    folder: Path
    environment: TaskEnvironment
    steps: tuple[TaskStep, ...]
    is_final: bool = False
    """The last step's reward is the task's; else the mean is."""
    solution_env: dict[str, str] = {}
    columns: dict[str, Any] = {}
    """What describes the task and is not read: `package` (the table `task`), `metadata`, `source`."""
    unknown_keys: tuple[str, ...] = ()

    def is_cut(self, most: Network) -> bool:
        """Return whether the policy or a verifier asks for more network than sandboxes have."""
        reaches = [reach for step in self.steps for reach in (step.reach, step.verifier.reach)]
        networks = list(Network)
        return any(networks.index(reach.network) > networks.index(most) for reach in reaches)

    def digest(self) -> str:
        """Return a hash of all files of the task: their paths, contents and permission to be executed."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                executable = b"x" if os.access(path, os.X_OK) else b"-"
                digest.update(b"%s\0%s\0" % (os.fsencode(path.relative_to(self.folder)), executable))
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def selected_files(task: Path, folder: Path) -> dict[str, Path]:
    """Return the files of a folder of a task, by their paths in it, sorted.

    Args:
        task: folder of the task.
        folder: one of its folders of tests or of a solution.

    Raises:
        TaskError: a link leads out of the task.
    """
    files: dict[str, Path] = {}
    rules: dict[Path, Any] = {}
    for root, folders, names in os.walk(folder):
        place = Path(root)
        if IGNORE_FILE in names:
            spec = import_extra("pathspec", "harbor").GitIgnoreSpec
            rules[place] = spec.from_lines((place / IGNORE_FILE).read_text().splitlines())
        folders[:] = sorted(name for name in folders if not _is_ignored(place / name, rules, "/"))
        for name in names:
            file = place / name
            if name == IGNORE_FILE or _is_ignored(file, rules):
                continue
            if not file.resolve().is_relative_to(task):
                raise TaskError("link", str(file), "it leads out of the task's folder")
            if file.is_file():
                files[file.relative_to(folder).as_posix()] = file
    return dict(sorted(files.items()))


def _is_ignored(path: Path, rules: dict[Path, Any], suffix: str = "") -> bool:
    """Return whether rules exclude a path; the deepest folder with a rule for it decides."""
    for folder in sorted((each for each in rules if path.is_relative_to(each)), reverse=True):
        match = rules[folder].check_file(path.relative_to(folder).as_posix() + suffix)
        if match.include is not None:
            return bool(match.include)
    return False
