"""The command `penstock check FILE.toml`: the preflight of a run, without the run."""

import sys
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path

import anyio
import click
import msgspec

from stream.durable import write_file_atomically
from stream.errors import PenstockError
from workers.run.preflight.findings import PreflightReport, render_findings
from workers.run.preflight.preflight import run_preflight
from workers.runtime.daemon_thread import run_in_daemon_thread
from workers.runtime.exit_codes import ExitCode
from workers.runtime.hang_guard import HangGuard
from workers.settings import Settings
from workers.settings.toml_file import load_settings


def check_settings_file(file: Path, overrides: tuple[str, ...], out: Path | None, *, as_json: bool) -> ExitCode:
    """Test everything that a settings file names, and print the findings.

    Args:
        file: settings file.
        overrides: values of single settings; they take precedence over the file.
        out: also write the report to this file, as JSON.
        as_json: print the report as JSON.

    Returns:
        `SUCCESS` if the run can work, else `FAILURE`.

    Raises:
        SettingsError: the settings are invalid.
        PenstockError: the report cannot be written.
    """
    settings = load_settings(file, overrides)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # user code may print
        report = run_in_daemon_thread(partial(_run_guarded, settings))
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if out is not None:
        try:
            write_file_atomically(out, encoded)
        except OSError as error:
            raise PenstockError(f"{out} could not be written: {error.strerror}") from error
    if as_json:
        click.echo(encoded.decode())
    else:
        if report.findings:
            click.echo(render_findings(report))
        click.echo(f"checked in {report.seconds:.1f} s: {', '.join(report.checked)}")
    return ExitCode.FAILURE if report.errors else ExitCode.SUCCESS


async def _run_guarded(settings: Settings) -> PreflightReport:
    """Run the preflight; user code that never lets the event loop turn ends the process."""
    guard = HangGuard(settings.hang_timeout_s)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(guard.watch)
        report = await run_preflight(settings)
        tasks.cancel_scope.cancel()
    return report
