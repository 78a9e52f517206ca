"""An environment whose tool runs the model's Python, each program in a sandbox of its own.

`envs.sandboxes.python_runner` says what a program finds: no network, no process but its own, no environment variable of
the worker, the system's files and the interpreter's library to read, an empty folder to write; and what is left of that
where this machine makes no sandboxes.
"""

import signal
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from envs.sandboxes.bubblewrap import warn_without_sandbox
from envs.sandboxes.python_runner import PythonRunner, RunnerLimits, RunnerResult


@dataclass(frozen=True)
class SandboxRun:
    """One tool call."""

    code: str
    output: str


class Python:
    """Run Python code. No state is kept between calls.

    Args:
        timeout_s: wall time of one call.
        cpu_s: CPU seconds of one call.
        memory_mb: address space of one call.
        file_mb: size of each file that the code writes.
        output_chars: characters of the output that the model reads; the middle is cut.
        processes: processes and threads that the code may start. Above 0 it has no effect for root whose interpreter
            others cannot read.
        interpreter: the Python that runs the code, without site packages.
    """

    without_sandbox: ClassVar[str] = (
        "the model's code runs with limits alone: it can use the network, read the worker's files and the environment "
        "of processes of its user, and signal them"
    )

    def __init__(
        self,
        timeout_s: float = 10.0,
        cpu_s: int = 10,
        memory_mb: int = 512,
        file_mb: int = 16,
        output_chars: int = 4000,
        processes: int = 0,
        interpreter: str = sys.executable,
    ) -> None:
        self.runs: list[SandboxRun] = []
        limits = RunnerLimits(
            timeout_s=timeout_s,
            cpu_s=cpu_s,
            memory_mb=memory_mb,
            file_mb=file_mb,
            output_chars=output_chars,
            processes=processes,
        )
        self._runner = PythonRunner(interpreter, limits)
        warn_without_sandbox("python", self.without_sandbox)

    def reset(self, **row: Any) -> None:  # noqa: ARG002
        """Start an episode; the task is in the prompt."""
        self.runs = []

    async def python(self, code: str) -> str:
        """Run Python code in a fresh interpreter, and read what it printed.

        Args:
            code: A whole program. Only what it prints is seen; nothing is kept for the next call.
        """
        result = await self._runner.run(code.encode("utf-8", "replace"))
        text = "\n".join(filter(None, [result.output.rstrip("\n"), self._describe_end(result)])) or "(no output)"
        self.runs.append(SandboxRun(code, text))
        return text

    def _describe_end(self, result: RunnerResult) -> str:
        """Describe the end of a program for the model; empty for success."""
        if result.timed_out:
            return f"TimeoutError: the code did not end within {self._runner.limits.timeout_s:g} s"
        if result.code >= 0:
            return "" if result.code == 0 else f"(exit code {result.code})"
        names = {
            signal.SIGXCPU: "its processor time was over",
            signal.SIGKILL: "it was killed: too much processor time",
        }
        number = signal.Signals(-result.code)
        return f"(ended by {number.name}: {names.get(number, 'it crashed')})"
