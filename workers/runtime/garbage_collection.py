"""Put off garbage collections while a process starts.

Imports make some hundred thousand objects that stay. Python's collector looks through them again and again, which takes
a tenth of a command's time.
"""

import gc
from typing import Final

_NORMAL: Final = gc.get_threshold()
_WHILE_STARTING: Final = 100_000
"""New objects before a collection."""


def defer_collections() -> None:
    """Collect rarely; for the start of a process, and for commands that end soon."""
    gc.set_threshold(_WHILE_STARTING)


def collect_as_usual() -> None:
    """End `defer_collections`: collect at Python's pace, but never look through what has been imported until now."""
    if gc.get_threshold()[0] == _WHILE_STARTING:
        gc.freeze()
        gc.set_threshold(*_NORMAL)
