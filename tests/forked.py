"""Processes that begin with all that this one has imported: for tests of several ranks, which import the same."""

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
"""What a learner imports when it needs it, and takes seconds."""


def import_ahead() -> None:
    """Import what a learner imports when it needs it."""
    for name in DEAR:
        importlib.import_module(name)


def fork(main: Callable[[], int]) -> int:
    """Begin a process that ends with what this returns; gives its id. The one that calls it has to have one thread."""
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
    """Wait for it; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
