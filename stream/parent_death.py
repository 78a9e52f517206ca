"""Run a command that dies with its parent: `python parent_death.py PARENT_PID COMMAND...`.

On Linux the kernel sends SIGKILL to the command when the *thread* that started it ends for any reason, so start it
from a thread that lives as long as the process. On other systems this is a plain exec. Without it a private server
would outlive a supervisor that was killed.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Make this process die with its parent; exit now if the parent has ended already.

    Args:
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            sys.exit(1)


def main(argv: list[str]) -> None:
    """Make this process die with its parent, then replace it by the command."""
    parent, *command = argv
    die_with_parent(int(parent))
    os.execvp(command[0], command)  # noqa: S606  (a fixed argument list, no shell)


if __name__ == "__main__":
    main(sys.argv[1:])
