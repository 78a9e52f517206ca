"""Exit codes of `penstock` and of its roles.

===  ============  ======================================================  =================================
0    SUCCESS       done, or stopped as requested                           a finished role is not restarted
1    FAILURE       failed, or a check has findings                         restarted, within its budget
2    USAGE         command line or settings are wrong; nothing was begun   fails the run
3    RECYCLE       a worker drained because user code used it up           restarted, counts as no failure
4    PERMANENT     failed, and a restart would fail the same way           fails the run
5    UNTRAINED     the run ended normally, and cannot have learned         (the supervisor's own)
                   anything: all rewards were equal, or no group trained
130  INTERRUPTED   a second signal killed processes that were draining     (the supervisor's own)
===  ============  ======================================================  =================================

The last column says what `penstock run` does when one of its roles exits with the code. Python itself exits with 1 for
an unexpected exception; a process killed by signal N has the code -N.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the end of a process means; see the table above."""

    SUCCESS = 0
    FAILURE = 1
    USAGE = 2
    RECYCLE = 3
    PERMANENT = 4
    UNTRAINED = 5
    INTERRUPTED = 130
