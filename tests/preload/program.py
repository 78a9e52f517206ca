"""Runs in this process what `python ARGUMENTS` runs in a new one."""

import atexit
import os
import runpy
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import NoReturn


def run_to_end(arguments: list[str]) -> NoReturn:
    """Run what the arguments name, then exit as the interpreter does."""
    code = 1
    try:
        _run(arguments)
        code = 0
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(arguments: list[str]) -> None:
    is_safe_path = arguments[0] == "-P"
    arguments = arguments[is_safe_path:]
    sys.path[:] = filter(None, sys.path)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if not is_safe_path:
            sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        if not is_safe_path:
            sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[1], main.__dict__)
    else:
        sys.argv = arguments
        if not is_safe_path:
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _exit_code(leaving: SystemExit) -> int:
    """The exit code of a process that was left by this."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1
