"""Fork processes that start with all modules of this one: for tests of several ranks with the same imports."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Final

DEAR: Final = (
    "peft",
    "torch._dynamo",
    "torch.distributed.elastic",
    "torch.distributed.fsdp",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.utils.hub",
)
"""Modules that a learner imports late and that take seconds to import."""


def import_ahead() -> None:
    """Import the modules that a learner imports late."""
    for name in DEAR:
        importlib.import_module(name)


def fork(main: Callable[[], int]) -> int:
    """Fork a process that exits with `main`'s result; returns its pid. The calling process must have one thread."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> int:
    """Wait for the process; returns its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
