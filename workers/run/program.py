"""A Python command line, and how to run it in a process that is there already."""

import atexit
import runpy
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from msgspec import Struct


class Program(Struct, frozen=True):
    """A Python command line, split as the interpreter splits it."""

    command: list[str]
    """The complete command line, as `ps` shows it."""
    kind: str
    """`-m`, `-c`, or empty for a script."""
    target: str
    """The module, the code, or the script's path."""
    arguments: list[str]
    safe_path: bool
    """Option `-P`: neither the working directory nor the script's folder is prepended to `sys.path`."""

    @classmethod
    def parse(cls, command: Sequence[str]) -> "Program | None":
        """Parse a command line. None: it needs another interpreter, or options that only a new interpreter applies."""
        executable, *rest = command
        safe_path = rest[:1] == ["-P"]
        rest = rest[safe_path:]
        kind = rest.pop(0) if rest and rest[0] in {"-m", "-c"} else ""
        if executable != sys.executable or not rest or (not kind and rest[0].startswith("-")):
            return None
        return cls(list(command), kind, rest[0], rest[1:], safe_path)

    def run(self) -> int:
        """Run the program in this process as the interpreter would. Returns its exit code."""
        sys.argv[1:] = self.arguments
        first = {"-m": str(Path.cwd()), "-c": "", "": str(Path(self.target).resolve().parent)}[self.kind]
        if not self.safe_path:
            sys.path.insert(0, first)
        try:
            if self.kind == "-m":
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            elif self.kind == "-c":
                sys.argv[0] = "-c"
                main = sys.modules["__main__"] = ModuleType("__main__")
                exec(compile(self.target, "<string>", "exec"), main.__dict__)  # noqa: S102
            else:
                sys.argv[0] = self.target
                runpy.run_path(self.target, run_name="__main__")
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if code and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)  # noqa: T201  (as the interpreter does)
        except BaseException:  # noqa: BLE001  (as the interpreter does)
            sys.excepthook(*sys.exc_info())
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  (as the interpreter does at exit)
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
        return code & 0xFF
