"""How often Python looks for cycles of garbage: rarely while a process starts, and where many objects are in flight.

Imports make some hundred thousand objects that stay. Python's collector looks through them again and again, which takes
a tenth of a command's time.
"""

import gc
from typing import Final

_NORMAL: Final = gc.get_threshold()
_WHILE_STARTING: Final = 100_000
"""New objects before a collection."""
_IN_FLIGHT: Final = 10_000
"""The same in a worker with many requests in flight: each collection visits what belongs to them, and finds little."""


def defer_collections() -> None:
    """Collect rarely; for the start of a process, and for commands that end soon."""
    gc.set_threshold(_WHILE_STARTING)


def collect_as_usual() -> None:
    """End `defer_collections`: collect at Python's pace, but never look through what has been imported until now."""
    if gc.get_threshold()[0] == _WHILE_STARTING:
        gc.freeze()
        gc.set_threshold(*_NORMAL)


def collect_less_often() -> None:
    """Collect at a fraction of Python's pace, for workers with many requests in flight; a threshold of the user stays.

    With 64 completions in flight collections took a tenth of a worker's CPU time.
    """
    if gc.get_threshold() == _NORMAL:
        gc.set_threshold(_IN_FLIGHT, *_NORMAL[1:])
