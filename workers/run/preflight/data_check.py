"""Checks prompt files: that they open, and that their first rows are prompts."""

from typing import Final

from stream.errors import DataError
from stream.records import Prompt
from workers.feed.dataset_mix import open_dataset_mix
from workers.run.preflight.findings import PreflightReport
from workers.settings import Settings

_ROWS: Final = 64
"""Rows that are read; the feeder reports the others when it comes to them."""


def check_data(settings: Settings, report: PreflightReport) -> list[Prompt]:
    """Report faults of `[data]` and of `eval.path`. Returns the first prompts of `[data]`."""
    prompts = _check_rows(settings, "data.sets" if settings.data.sets else "data.path", report)
    if settings.eval.path:
        _check_rows(settings.for_evaluation, "eval.path", report)
    report.checked.append(f"{len(prompts)} rows of the data")
    return prompts


def _check_rows(settings: Settings, key: str, report: PreflightReport) -> list[Prompt]:
    try:
        mix = open_dataset_mix(settings)
        total = mix.total_prompts
        prompts, errors = mix.read_prompts(0, min(_ROWS, total))
    except DataError as error:
        report.error("data", key, error)
        return []
    except OSError as error:
        report.error("data", key, f"{error.filename}: {error.strerror}")
        return []
    if not total:
        report.error("data", key, f"{mix.paths} has no rows")
    elif not prompts:
        report.error("data", key, f"not one of the first {len(errors)} rows is a prompt: {errors[0]}")
    elif errors:
        rows = len(errors) + len(prompts)
        report.warn("data", key, f"{len(errors)} of the first {rows} rows are no prompts and are not fed: {errors[0]}")
    if prompts and total < settings.train.batch_size and key != "eval.path":
        report.warn(
            "data",
            key,
            f"{total} prompts are fewer than train.batch_size = {settings.train.batch_size}: the run makes one step, "
            "with what there is",
        )
    return prompts
