"""Checks prompt files, and the rows of environments: that they open, and that their first rows are prompts."""

from collections.abc import Callable
from typing import Final

from stream.errors import DataError, ReferenceNotFoundError
from stream.records import Prompt
from workers.check.report import Checker, Subject
from workers.datasets.environment_rows import temporary_folder, write_evaluation_rows, write_training_rows
from workers.datasets.mix import open_dataset_mix
from workers.settings import Settings

_ROWS: Final = 64
"""Rows that are checked; the feeder reports faults of later rows when it reads them."""
_ROWS_TIMEOUT_S: Final = 20.0
"""Deadline of one call of an environment's `rows()`; the feeder waits longer for it."""


def check_data(checker: Checker, failed: frozenset[str] = frozenset()) -> list[Prompt]:
    """Report faults of `[data]` and `[eval]`; return the first prompts of `[data]`. Calls `rows()` of environments.

    Args:
        checker: collects the findings.
        failed: `data`, `eval`: names on a hub that could not be resolved, which is reported already.
    """
    settings = checker.settings
    data = checker.about("data", "data.sets" if settings.data.sets else "data.path")
    held_out = checker.about("data", "eval.path" if settings.eval.path else "eval.rows")
    with temporary_folder(settings) as own:
        prompts = []
        if "data" not in failed and _check_environment_rows(write_training_rows, own, data):
            prompts = _check_rows(own, data)
        is_evaluated = settings.eval.source and "eval" not in failed
        if is_evaluated and _check_environment_rows(write_evaluation_rows, own, held_out):
            _check_rows(own.for_evaluation, held_out)
    checker.checked.append(f"{len(prompts)} rows of the data")
    return prompts


def _check_environment_rows(write: Callable[[Settings, float], None], settings: Settings, data: Subject) -> bool:
    """Call `rows()` of the environments that bring their own rows. Returns whether there are rows to check."""
    try:
        write(settings, _ROWS_TIMEOUT_S)
    except DataError as error:
        if isinstance(error.__cause__, TimeoutError):
            data.warn(f"{error}, so its rows were not checked")
        else:
            data.error(error, cause=error.cause)
        return False
    except ReferenceNotFoundError:
        return False  # the check of the environments reports it
    return True


def _check_rows(settings: Settings, data: Subject) -> list[Prompt]:
    try:
        mix = open_dataset_mix(settings)
        total = mix.total_prompts
        prompts, errors = mix.read_prompts(0, min(_ROWS, total))
    except DataError as error:
        data.error(error)
        return []
    except OSError as error:
        data.error(f"{error.filename}: {error.strerror}")
        return []
    if not total:
        data.error(f"{mix.paths} has no rows")
    elif not prompts:
        data.error(f"none of the first {len(errors)} rows is a prompt; the first: {errors[0]}")
    elif errors:
        rows = len(errors) + len(prompts)
        data.warn(f"{len(errors)} of the first {rows} rows are no prompts and will be skipped; the first: {errors[0]}")
    if prompts and total < settings.train.batch_size and not data.place.startswith("eval."):
        data.warn(
            f"{total} prompts are fewer than train.batch_size = {settings.train.batch_size}: the run makes one step, "
            "with what there is",
        )
    return prompts
