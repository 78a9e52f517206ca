"""Writes the rows that environments provide to files in the run's folder, from which they are fed.

An environment's `rows()` is called once for a run. A restart, the audit and every other process read the same rows from
the file, even if the method would return others by then.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import structlog

from envs.call import recorded_call
from envs.factory import EnvironmentFactory, call_rows
from stream.durable import write_file_atomically
from stream.errors import DataError
from workers.settings import Settings
from workers.settings.data import ENVIRONMENT_ROWS, DatasetSettings

log = structlog.get_logger()

TIMEOUT_S: Final = 600.0
"""For one call of `rows()`, which may load a large data set."""


@contextmanager
def temporary_folder(settings: Settings) -> Iterator[Settings]:
    """Yield settings whose run has an empty folder, which is removed afterwards: rows that are needed without a run."""
    with tempfile.TemporaryDirectory(prefix="penstock-rows-") as folder:
        run = msgspec.structs.replace(settings.run, folder=folder, name=settings.run.name or "rows")
        yield msgspec.structs.replace(settings, run=run)


def write_training_rows(settings: Settings, timeout_s: float = TIMEOUT_S) -> None:
    """Call `rows()` of each environment that feeds its own rows, unless the folder has them. Calls user code; blocks.

    Raises:
        DataError: an environment has no rows, or cannot make them.
    """
    for dataset in settings.datasets:
        if file := _missing_file(dataset):
            factory = _load(settings, dataset)
            with recorded_call(f"environment {dataset.environment} (rows)"):
                rows = call_rows(factory, dataset.environment, "train", 0, timeout_s)
            if rows is None:
                raise DataError(_no_rows(dataset.environment))
            _write(file, rows)


def write_evaluation_rows(settings: Settings, timeout_s: float = TIMEOUT_S) -> None:
    """Write the problems of `eval.rows`, unless the folder has them. Calls user code; blocks.

    Raises:
        DataError: an environment has no held-out rows, or cannot make them.
    """
    for dataset in settings.for_evaluation.datasets if settings.eval.rows else ():
        if file := _missing_file(dataset):
            factory, limit = _load(settings, dataset), settings.eval.rows
            with recorded_call(f"environment {dataset.environment} (rows)"):
                rows = call_rows(factory, dataset.environment, "eval", limit, timeout_s)
            if rows is None and factory.has_rows:
                raise DataError(_no_held_out_rows(dataset.environment))
            _write(file, rows if rows is not None else [b"{}"] * limit)


def _missing_file(dataset: DatasetSettings) -> Path | None:
    """Return the file that has to be written for a data set; None if it needs none or has it."""
    if not dataset.path.startswith(ENVIRONMENT_ROWS):
        return None
    file = Path(dataset.path.removeprefix(ENVIRONMENT_ROWS))
    return None if file.exists() else file


def _load(settings: Settings, dataset: DatasetSettings) -> EnvironmentFactory:
    given = settings.environments[dataset.environment]
    ref, args = (given, {}) if isinstance(given, str) else (given.ref, given.args)
    with recorded_call(f"environment {dataset.environment}, its module and constructor"):
        return EnvironmentFactory.load(ref, args, with_tools=False)


def _write(file: Path, rows: list[bytes]) -> None:
    """Write all rows or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file_atomically(file, b"".join(row + b"\n" for row in rows))
    log.info("rows.written", file=str(file), rows=len(rows))


def _no_rows(name: str) -> str:
    return (
        f"[data] names no prompts, and environments.{name} has no method rows(); set data.path to a file, data.rows to "
        "a number if it makes its problem from the seed that reset gets, or add rows(), which returns a list of rows"
    )


def _no_held_out_rows(name: str) -> str:
    return (
        f"eval.rows is set, and rows() of environments.{name} has no parameter `split`, so it has no rows that are not "
        "trained on; return others for split='eval', or set eval.path to a file"
    )
