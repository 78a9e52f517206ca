"""Exit codes of the command `penstock` and of the processes of a run."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the end of a process means. A code below 0 stands for a signal."""

    SUCCESS = 0
    """The work is done, or a requested drain has finished."""
    FAILURE = 1
    """It failed, and a restart may help; of a command that measures or compares: it found a problem."""
    USAGE = 2
    """The command line or the settings are wrong. Nothing was started."""
    RECYCLE = 3
    """A drained worker asks to be restarted, because user code has used it up. Nothing has failed."""
    PERMANENT = 4
    """It failed in a way that a restart cannot fix."""
    INTERRUPTED = 130
    """A second Ctrl-C killed processes that had not drained."""
