"""The run's folder: it belongs to one run, and one supervisor at a time uses it.

::

    runs/NAME/  run.toml        the resolved settings; `penstock run runs/NAME/run.toml` resumes
                live.json       URL of the server; exists while the run is running
                logs/           one log file per process
                redis/          the private server's data
                trainer.lock    which trainer may change checkpoints, ledger and metrics (`stream.trainer.folder_lock`)
                summary.json    result of the last start
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stream.connection.address import has_secret
from stream.errors import PenstockError, RunMismatchError
from workers.settings import Settings
from workers.settings.toml_file import dump_settings, load_settings

_SAME_RUN = (
    "run.name",
    "run.seed",
    "model",
    "data",
    "environments",
    "rewards",
    "rollout.group_size",
    "rollout.temperature",
    "estimator",
    "loss",
    "algorithm",
    "filter",
    "correction",
)
"""Settings that must not change when a run is resumed. All others may: steps, workers, threads, limits, timeouts."""
_MAY_CHANGE = ("data.max_queued_prompts",)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder for one supervisor until the block, or this process, ends.

    Raises:
        PenstockError: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "supervisor.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise PenstockError(
                f"{folder} is in use by process {file.read().strip()}: a run has one supervisor; stop that one first, "
                "or give this run another run.name"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def write_settings(settings: Settings) -> Path:
    """Write the resolved settings to `run.toml`, unless the folder belongs to another run.

    Returns:
        The file that the roles read.

    Raises:
        RunMismatchError: the folder's run differs in settings that must not change; lists the keys.
    """
    file = settings.folder / "run.toml"
    if file.exists():
        different = setting_differences(load_settings(file), settings)
        if different:
            raise RunMismatchError(
                f"{settings.folder} holds another run: {'; '.join(different)}. Give this one another run.name or "
                "run.folder, or remove that folder"
            )
    write_atomically(file, dump_settings(settings).encode(), private=has_secret(settings.run.redis))
    return file


def setting_differences(stored: Settings, current: Settings) -> list[str]:
    """Describe the settings that make these two different runs: key and both values. Empty: the same run."""
    old, new = (_flat(msgspec.to_builtins(settings, str_keys=True)) for settings in (stored, current))
    return [
        f"{key} is {old.get(key)!r} there and {new.get(key)!r} here"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and _within(key, _SAME_RUN) and not _within(key, _MAY_CHANGE)
    ]


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file completely or not at all; `private`: only its owner can read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666), "wb") as file:  # noqa: PTH123
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _within(key: str, places: tuple[str, ...]) -> bool:
    return any(key == place or key.startswith(f"{place}.") for place in places)


def _flat(value: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested tables to `section.key`; an empty table stays as a value."""
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        key = f"{path}.{name}" if path else name
        if isinstance(inner, dict) and inner:
            flat |= _flat(inner, key)
        else:
            flat[key] = inner
    return flat
