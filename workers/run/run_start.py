"""What a start of `penstock run` is going to do: begin a run, resume one, or nothing because it has finished."""

from pathlib import Path
from typing import Final

import click
from msgspec import Struct

from stream.connection.run_identity import RunIdentity
from stream.errors import PenstockError, SettingsError
from workers.runs.find import explain_missing_file, find_settings_file
from workers.runs.folder import find_newest_run, new_run_name
from workers.runs.identity import describe_changes
from workers.runs.summary import RunSummary, latest_progress, read_summary
from workers.settings import Settings
from workers.settings.toml_file import load_settings

_NOT_SETTINGS: Final = (".py", ".jsonl", ".parquet")


class RunStart(Struct, frozen=True, kw_only=True):
    """The settings of a start."""

    file: Path
    overrides: tuple[str, ...]
    """Values of single settings, the name of a new run included."""
    settings: Settings
    earlier: Path | None = None
    """`run.toml` of the newest earlier run of the same file, if this is a new one."""


def prepare_start(target: str, overrides: tuple[str, ...]) -> RunStart:
    """Find the settings of a run and name it if it has no name.

    Args:
        target: settings file; or folder or name of a run, which is resumed.
        overrides: values of single settings; they take precedence over the file.

    Raises:
        SettingsError: there is no such file and no such run, or the settings are invalid.
    """
    file = find_settings_file(target)
    if file is None or file.suffix in _NOT_SETTINGS:
        raise SettingsError(explain_missing_file(target) or _explain_target(target))
    settings = load_settings(file, overrides)
    if settings.run.name:
        return RunStart(file=file, overrides=overrides, settings=settings)
    earlier = find_newest_run(file)
    overrides = (*overrides, f"run.name={new_run_name(file)}")
    return RunStart(file=file, overrides=overrides, settings=load_settings(file, overrides), earlier=earlier)


def _explain_target(target: str) -> str:
    """Return why a target is no settings file and no run, and where it belongs."""
    problem = f"{target or repr(target)} is neither a settings file, nor the folder or the name of a run"
    name, _, attribute = target.partition(":")
    if name.endswith(".py"):
        ref = target if attribute else f"{target}:NAME"
        return f"{problem}: Python code is named in a settings file; `penstock check {ref}` tries it"
    if name.endswith(_NOT_SETTINGS):
        return f'{problem}: prompts are named in a settings file, as [data] path = "{target}"'
    if (Path(target) / "config.json").is_file():
        return f'{problem}: a model is named in a settings file, as [model] path = "{target}"'
    return problem


def finished_summary(settings: Settings) -> RunSummary | None:
    """Return the summary of a run that has finished, if no setting was changed since; None if it has work to do."""
    summary = read_summary(settings.folder)
    if summary is None or not summary.finished:
        return None
    try:
        stored = load_settings(settings.folder / "run.toml")
    except PenstockError:
        return None
    return summary if stored == settings else None


def finished_text(settings: Settings, summary: RunSummary) -> str:
    """Say that a run has finished, and what can be done with it."""
    text = (
        f"run {settings.run.name} has finished: {_count(summary.steps, 'step')}, "
        f"{_count(summary.groups_trained, 'group')} trained. `penstock export {settings.folder} OUT` copies its model. "
        "If train.max_steps ended it, a larger one goes on with it; to start anew, give it another run.name"
    )
    return f"{text}. {summary.verdict}" if summary.verdict else text


def start_lines(settings: Settings, identity: RunIdentity | None, earlier: Path | None = None) -> list[str]:
    """Describe a start: what it begins or resumes, and which settings and code differ from the last start."""
    if identity is None:
        lines = [f"new run {settings.run.name} in {settings.folder}"]
        if earlier is not None:
            lines.append(f"`penstock run {earlier.parent}` resumes the one before")
        return lines
    step, limit = latest_progress(settings.folder).step, settings.train.max_steps
    what = f"resuming run {settings.run.name} at step {step}" + (f" of {limit}" if limit else "")
    return ["; ".join([what, *describe_changes(identity, settings)])]


def print_start(lines: list[str]) -> None:
    """Print the description to stderr."""
    for line in lines:
        click.echo(line, err=True)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
