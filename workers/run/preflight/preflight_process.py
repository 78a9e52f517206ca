"""Runs the preflight in a process of its own, so that user code can neither hang nor end `penstock run`."""

import sys
import tempfile
from pathlib import Path
from typing import Final

import anyio
import msgspec

from workers.run.child_process import ChildProcess, describe_exit
from workers.run.preflight.findings import PreflightReport
from workers.run.process_launcher import ProcessLauncher
from workers.run.role_specs import LIGHT_MODULES, RoleSpec, penstock_command
from workers.runtime.exit_codes import ExitCode

_TIMEOUT_S: Final = 180.0
"""For all checks together; each call of user code has a shorter deadline of its own."""
_OUTPUT_LINES: Final = 20


async def run_preflight_process(launcher: ProcessLauncher, file: Path, overrides: tuple[str, ...]) -> PreflightReport:
    """Run `penstock check FILE` and return its report.

    Args:
        launcher: starts the process.
        file: settings file.
        overrides: values of single settings; they take precedence over the file.

    Raises:
        RunFailedError: the process cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as name:
        folder = Path(name)
        path = folder / "report.json"
        options = [part for override in overrides for part in ("--set", override)]
        command = (*penstock_command(), "check", str(file), "--report", str(path), *options)
        child = ChildProcess(RoleSpec(role="check", command=command, modules=LIGHT_MODULES), folder, launcher)
        code: int | None = None
        with anyio.move_on_after(_TIMEOUT_S):
            code = await child.run()
        return await anyio.to_thread.run_sync(_read_report, path, code, child.log_file)


def print_report(text: str) -> None:
    """Print findings to stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201  (this is the command's output)


def _read_report(path: Path, code: int | None, log: Path) -> PreflightReport:
    """Return the report; one that says what happened if the process wrote none."""
    if code in (ExitCode.SUCCESS, ExitCode.FAILURE) and path.exists():
        return msgspec.json.decode(path.read_bytes(), type=PreflightReport)
    report = PreflightReport(seconds=_TIMEOUT_S if code is None else 0.0)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_OUTPUT_LINES:]) if log.exists() else ""
    how = f"did not end within {_TIMEOUT_S:g} s" if code is None else describe_exit(code)
    report.error(
        "check",
        "user code",
        f"the process that tries environments and reward functions {how}; `penstock check REF` tries each of them "
        f"alone, and `penstock run --no-check` starts without this check. Its last output:\n{tail}",
    )
    return report
