"""Runs the preflight in a process of its own, so that user code can neither hang nor end `penstock run`."""

import sys
import tempfile
from pathlib import Path
from typing import Final

import anyio
import msgspec

from workers.check.report import CheckFinding, CheckReport
from workers.launch.children import ChildProcess
from workers.launch.specs import ProcessSpec, penstock_command
from workers.launch.wait_lines import WaitLines
from workers.role.exit_codes import ExitCode

_TIMEOUT_S: Final = 180.0
"""For all checks together; each call of user code has a shorter deadline of its own."""
_OUTPUT_LINES: Final = 20
_LOOK_S: Final = 1.0


async def run_preflight_process(file: Path, overrides: tuple[str, ...], hang_timeout_s: float) -> CheckReport:
    """Run `penstock check FILE` and return its report.

    Args:
        file: settings file.
        overrides: values of single settings; they take precedence over the file.
        hang_timeout_s: how long its event loop may stand still.

    Raises:
        RunFailedError: the process cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as name:
        folder = Path(name)
        path = folder / "report.json"
        options = [part for override in overrides for part in ("--set", override)]
        command = (*penstock_command(), "check", str(file), "--report", str(path), *options)
        spec = ProcessSpec(role="check", command=command)
        child = ChildProcess(spec, folder, min(hang_timeout_s, _TIMEOUT_S / 2))
        how = f"did not end within {_TIMEOUT_S:g} s"
        code: int | None = None
        with anyio.move_on_after(_TIMEOUT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_show_waits, child)
                code = await child.run()
                how = child.describe_end(code)
                tasks.cancel_scope.cancel()
        return await anyio.to_thread.run_sync(_read_report, path, file, code, how, child.log_file)


async def _show_waits(child: ChildProcess) -> None:
    """Print which user code the process waits for, until cancelled."""
    waits = WaitLines()
    while True:
        for wait in waits.observe((child.spec.role, call) for call in child.running_calls()):
            print(f"waiting: {wait.text}", file=sys.stderr, flush=True)  # noqa: T201
        await anyio.sleep(_LOOK_S)


def _read_report(path: Path, file: Path, code: int | None, how: str, log: Path) -> CheckReport:
    """Return the report; one that says what happened if the process wrote none."""
    if code in (ExitCode.SUCCESS, ExitCode.FAILURE) and path.exists():
        return msgspec.json.decode(path.read_bytes(), type=CheckReport)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_OUTPUT_LINES:]) if log.exists() else ""
    finding = CheckFinding(
        level="error",
        subject="check",
        place="user code",
        message=f"the process that tries environments and reward functions {how}. Its last output:\n{tail}\n",
        remedy="`penstock check REF` tries each of them alone, and `penstock run --no-check` starts without this check",
    )
    return CheckReport(target=str(file), kind="settings file", ok=False, findings=(finding,))
