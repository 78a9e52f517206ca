"""Run a command that dies with its parent: `python tether.py COMMAND...`.

On Linux the kernel sends SIGKILL to the command when the *thread* that started it ends, however it ends: start it from
one that lives as long as the process. Elsewhere this is a plain exec. Without it a private server would outlive a
supervisor that was killed.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let this process die with its parent; end it at once where the parent has ended already.

    Args:
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            sys.exit(1)


def main(argv: list[str]) -> None:
    """Tie this process to its parent, then become the command."""
    die_with_parent(os.getppid())
    os.execvp(argv[0], argv)  # noqa: S606  (a fixed argument list, no shell)


if __name__ == "__main__":
    main(sys.argv[1:])
