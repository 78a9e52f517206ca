"""The client's side of `runner.sh`: the commands that use it in a sandbox, and what its replies mean.

The folder of its state is in memory, writable by all users of the sandbox, and counts as the sandbox's own memory.
"""

import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import Final

from envs.sandboxes.contract import ExecResult

STATE_FOLDER: Final = "/run/penstock"
RUNNER: Final = resources.files("envs.sandboxes").joinpath("runner.sh").read_text()
LIFE_OVER_CODE: Final = 3
"""Exit code of the first process after the sandbox's longest life."""
NO_SETSID_CODE: Final = 5
"""Exit code of the first process in an image without `setsid`."""
_FILE: Final = f"{STATE_FOLDER}/runner"
_LIVE: Final = f'printf %s "$1" >{_FILE}.new; mv {_FILE}.new {_FILE}; exec sh {_FILE} live "$2"'
_ONCE_WRITTEN: Final = (
    f'for wait in 1 2 3 4 5 6; do [ -e {_FILE} ] && break; sleep .3 || sleep 1; done; exec sh {_FILE} "$@"'
)
_PLAIN: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,80}\Z", re.ASCII)
_HEADER: Final = re.compile(rb"(exited|timeout|fence|fenced) (\d+) ([\d.]+) ([\d.]+) ([01]) (\d+) (\d+)\n")


class FencedError(Exception):
    """The runner has seen a larger fence."""


def first_process(max_life_s: float) -> list[str]:
    """Return the command of a sandbox's first process, which does nothing until the sandbox's life is over."""
    return ["sh", "-c", _LIVE, "sh", RUNNER, str(max(int(max_life_s), 1))]


def fence_command(fence: int) -> list[str]:
    """Return the command after which calls with a smaller fence are refused."""
    return ["sh", "-c", _ONCE_WRITTEN, "sh", "fence", str(fence)]


def run_command(
    call_id: str, fence: int, timeout_s: float, max_bytes: int, folder: str, command: Sequence[str]
) -> list[str]:
    """Return the command that runs a command once by its id, or waits for the first one's result."""
    name = call_id if _PLAIN.match(call_id) else hashlib.sha256(call_id.encode()).hexdigest()
    arguments = ["run", name, str(fence), f"{max(timeout_s, 0.1):.2f}", str(max_bytes), folder]
    return ["sh", "-c", _ONCE_WRITTEN, "sh", *arguments, *command]


def parse_reply(stdout: bytes, stderr: bytes) -> ExecResult | None:
    """Return the result in a runner's reply; None if that is not whole, so that it has to be asked for again.

    Raises:
        FencedError: the runner has refused the call.
    """
    header = _HEADER.match(stdout)
    if header is None:
        return None
    if header[1] == b"fenced":
        raise FencedError
    out_size, err_size = int(header[6]), int(header[7])
    output = stdout[header.end() :]
    if len(output) < out_size or len(stderr) < err_size:
        return None
    return ExecResult(
        code=int(header[2]),
        ended="timeout" if header[1] == b"timeout" else "exited",
        stdout=output[:out_size],
        stderr=stderr[:err_size],
        truncated=header[5] == b"1",
        seconds=max(float(header[4]) - float(header[3]), 0.0),
    )
