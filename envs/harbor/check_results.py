"""What `penstock check harbor` found out about tasks, kept in their folder by the hash of their files.

A task that has changed since counts as not checked.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from envs.harbor.task import Task
from stream.durable import write_file_atomically

FILE: Final = ".penstock-check.json"


class TaskCheck(Struct, kw_only=True):
    """How the solution and an episode without a call were rewarded."""

    digest: str
    """Hash of the task's files."""
    sound: bool
    """`oracle` reached the best value and `nop` did not, each time."""
    finding: str = ""
    """Why it is not sound."""
    oracle: list[float | None] = []
    """Rewards of the solution; None: unmeasured."""
    nop: list[float | None] = []
    """Rewards of an episode without a call."""
    seconds: float = 0.0
    """Median time of a run, from the start of its sandbox to its reward."""
    cut_network: bool = False
    """It asks for a network that its sandboxes did not have."""
    tampered: list[str] = []
    """System files that the solution changed."""


def read_checks(folder: Path) -> dict[str, TaskCheck]:
    """Return the results that a folder of tasks has, by the path of the task in it; none if they cannot be read."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=dict[str, TaskCheck])
    except (OSError, ValueError):
        return {}


def write_checks(folder: Path, checks: dict[str, TaskCheck]) -> None:
    """Write results into a folder of tasks."""
    content = msgspec.json.format(msgspec.json.encode(dict(sorted(checks.items()))))
    write_file_atomically(folder / FILE, content + b"\n")


def sound_tasks(folder: Path, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks that were found sound, as they are now."""
    checks = read_checks(folder)
    folder = folder.resolve()

    def is_sound(task: Task) -> bool:
        check = checks.get(task.folder.relative_to(folder).as_posix())
        return check is not None and check.sound and check.digest == task.digest()

    return [task for task in tasks if is_sound(task)]
