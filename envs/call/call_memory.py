"""Which user code a process runs at this moment, in memory that another process reads after this one has died or hung.

A worker that user code ends (SIGKILL, a crash in C) or stops (code that never releases the interpreter) can say nothing
any more. So before each call it writes what it calls into memory that it shares with its supervisor::

    header    8 bytes: turns of the event loop · 8: process id
    slot      8 bytes: when its call began, by the monotonic clock; 0: it runs none · 8: kernel's id of the thread
              · text: what is called, then a zero byte

Each thread has one slot. To write one costs a call a microsecond, of about ten that it costs altogether.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from mmap import mmap
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FunctionType, MethodType
from typing import Any, Final

from msgspec import Struct

_SLOTS: Final = 256
"""Threads beyond these are not recorded."""
_SLOT_BYTES: Final = 256
_TEXT: Final = 16
"""Where a slot's text begins."""
_MAX_TEXT: Final = _SLOT_BYTES - _TEXT - 1
_BYTES: Final = _SLOTS * _SLOT_BYTES
"""The first slot's place is the header's."""

call_subject: ContextVar[bytes] = ContextVar("call_subject", default=b"")
"""What the calls of this task are about: `environment calculator, prompt 17`."""


def describe_subject(text: str) -> bytes:
    """Return a text as `call_subject` holds it."""
    return text.encode(errors="replace")[: _MAX_TEXT // 2]


class RunningCall(Struct, frozen=True):
    """A call of user code that had not ended when the memory was read."""

    began: float
    """By the monotonic clock, in seconds."""
    thread: int
    """The kernel's id of the thread."""
    text: str
    """What was called, and for which prompt."""


class CallSlot:
    """The slot of one thread.

    Args:
        memory: of the process.
        index: of the slot.
    """

    __slots__ = ("_at", "_began", "_index", "_memory")

    def __init__(self, memory: "CallMemory", index: int) -> None:
        self._memory = memory
        self._index = index
        self._at = index * _SLOT_BYTES + _TEXT
        self._began = index * _SLOT_BYTES // 8
        memory.numbers[self._began + 1] = threading.get_native_id()

    def begin(self, text: bytes) -> None:
        """Note that the thread calls user code now."""
        memory = self._memory
        memory.mapped[self._at : self._at + len(text)] = text
        memory.numbers[self._began] = time.monotonic_ns()

    def end(self) -> None:
        """Note that the call has ended."""
        self._memory.numbers[self._began] = 0

    def __del__(self) -> None:
        self.end()
        self._memory.free.append(self._index)


class CallMemory:
    """The writing side.

    Args:
        mapped: the shared memory.
    """

    def __init__(self, mapped: mmap) -> None:
        self.mapped = mapped
        self.numbers = memoryview(mapped).cast("q")
        self.free = list(range(_SLOTS - 1, 0, -1))
        """Slots without a thread."""
        self._local = threading.local()
        self.numbers[1] = os.getpid()

    @classmethod
    def open(cls, path: str) -> "CallMemory":
        """Open the memory that a supervisor made.

        Raises:
            OSError: it cannot be opened.
        """
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(mmap(descriptor, _BYTES))
        finally:
            os.close(descriptor)

    def note_turn(self) -> None:
        """Note that the event loop turns."""
        self.numbers[0] += 1

    def slot(self) -> CallSlot | None:
        """Return the slot of this thread; None if all are taken. It is freed when the thread ends."""
        try:
            slot: CallSlot | None = self._local.slot
        except AttributeError:
            slot = self._local.slot = self._take_slot()
        return slot

    def _take_slot(self) -> CallSlot | None:
        try:
            return CallSlot(self, self.free.pop())
        except IndexError:
            return None


class CallMemoryReader:
    """The reading side, in the supervisor.

    Args:
        path: by which the writer opens it.
        mapped: the shared memory.
    """

    def __init__(self, path: str, mapped: mmap) -> None:
        self.path = path
        self._mapped = mapped

    @property
    def turns(self) -> int:
        """How often the event loop has noted a turn; 0 before the first."""
        return self._number(0)

    @property
    def writer_pid(self) -> int:
        """Process id of the writer; 0 before it has opened the memory."""
        return self._number(8)

    def running_calls(self) -> list[RunningCall]:
        """Return the calls that have not ended, the newest first."""
        found = []
        for start in range(_SLOT_BYTES, _BYTES, _SLOT_BYTES):
            if began := self._number(start):
                text, _, _ = self._mapped[start + _TEXT : start + _SLOT_BYTES].partition(b"\0")
                found.append(RunningCall(began / 1e9, self._number(start + 8), text.decode(errors="replace")))
        return sorted(found, key=lambda call: -call.began)

    def _number(self, at: int) -> int:
        return int.from_bytes(self._mapped[at : at + 8], sys.byteorder)


@contextmanager
def make_call_memory() -> Iterator[CallMemoryReader]:
    """Make memory for one process; it is gone when the context ends, and with this process.

    Raises:
        OSError: there is none.
    """
    if hasattr(os, "memfd_create"):  # in no file system, so that a full disk does no harm and no file is left behind
        descriptor = os.memfd_create("penstock-calls")
        try:
            os.ftruncate(descriptor, _BYTES)
            with mmap(descriptor, _BYTES) as mapped:
                yield CallMemoryReader(f"/proc/{os.getpid()}/fd/{descriptor}", mapped)
        finally:
            os.close(descriptor)
        return
    with NamedTemporaryFile(prefix="penstock-calls-") as file:
        Path(file.name).write_bytes(bytes(_BYTES))
        with mmap(file.fileno(), _BYTES) as mapped:
            yield CallMemoryReader(file.name, mapped)


_memory: CallMemory | None = None


def record_calls(memory: CallMemory | None) -> None:
    """Write the calls of this process into a memory; None: not any more."""
    global _memory  # noqa: PLW0603  (one for the process, as its threads are)
    _memory = memory


def current_slot() -> CallSlot | None:
    """Return the slot of this thread; None if calls are not recorded."""
    return None if _memory is None else _memory.slot()


@contextmanager
def recorded_call(text: str) -> Iterator[None]:
    """Record user code that the body calls itself, in this thread."""
    slot = current_slot()
    if slot is not None:
        slot.begin(describe_subject(text) + b"\0")
    try:
        yield
    finally:
        if slot is not None:
            slot.end()


def call_text(function: Callable[..., Any], arguments: Mapping[str, Any]) -> bytes:
    """Return what a slot says of a call: the subject, and the function's name."""
    function = arguments.get("method", function)  # a tool's: `call_tool` converts what it returns
    kind = type(function)
    named = function if kind is MethodType or kind is FunctionType else kind
    return call_subject.get() + _name_part(named.__qualname__)


@lru_cache(maxsize=1024)
def _name_part(name: str) -> bytes:
    """Return the end of a slot's text, after the subject; wrappers, such as those of reward functions, have no name."""
    return (
        b"\0"
        if name == "partial" or "<locals>" in name
        else b" (%b)\0" % name.encode(errors="replace")[: _MAX_TEXT // 2 - 4]
    )
