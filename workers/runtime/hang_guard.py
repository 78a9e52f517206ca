"""Lets a role whose event loop stands still be ended, even by code that never releases Python's interpreter lock.

A role under `penstock run` shares memory with its supervisor: it notes there that its event loop turns, and which user
code it calls (`envs.call.call_memory`); the supervisor kills it. A role that was started alone is ended by a timer in
C, which needs no interpreter: it prints the stack of every thread (`Timeout (0:01:00)!`) and exits with 1.
"""

import faulthandler
import os
from typing import Final

import anyio
import structlog

from envs.call.call_memory import CallMemory, record_calls

log = structlog.get_logger()

CALL_MEMORY: Final = "PENSTOCK_CALL_MEMORY"
"""Environment variable by which a supervisor names the memory that it made for a role."""
_LONGEST_TURN_S: Final = 1.0
_STDERR: Final = 2


class HangGuard:
    """Guards this process.

    Args:
        timeout_s: how long the event loop may stand still.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._turn_s = min(_LONGEST_TURN_S, timeout_s / 4)
        self._memory = _open_memory()
        record_calls(self._memory)

    async def watch(self) -> None:
        """Note that the event loop turns, until cancelled."""
        try:
            while True:
                if self._memory is not None:
                    self._memory.note_turn()
                else:
                    faulthandler.dump_traceback_later(self._timeout_s, file=_STDERR, exit=True)
                await anyio.sleep(self._turn_s)
        finally:
            if self._memory is None:
                faulthandler.cancel_dump_traceback_later()


def _open_memory() -> CallMemory | None:
    path = os.environ.pop(CALL_MEMORY, "")  # not for the processes that user code starts
    if not path:
        return None
    try:
        return CallMemory.open(path)
    except OSError as error:
        log.warning("call_memory.unavailable", why=str(error))
        return None
