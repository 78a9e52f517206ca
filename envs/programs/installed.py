"""Where a program is installed, and what a sandbox has to show of this machine so that it starts there.

A program of npm needs its packages, and mostly `node`; one of pip its virtual environment and the interpreter below it;
a binary nothing but itself. Which of them it is, the file says.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Final, NamedTuple

from envs.sandboxes.bubblewrap import interpreter_paths
from stream.errors import ReferenceNotFoundError

_SEARCHED: Final = ("/usr/local/bin", "/usr/bin", "/bin")
"""PATH in the sandbox, before what a program needs is added."""
_MAX_SHEBANG: Final = 512


class InstalledProgram(NamedTuple):
    """A program on this machine."""

    path: str
    """Absolute, without links."""
    readable: tuple[str, ...]
    """Files and folders that it reads."""
    search_path: str
    """PATH of its sandbox: the system's folders, and that of its interpreter."""


def find_program(ref: str, executable: str, install: str, place: str = "") -> InstalledProgram:
    """Find a program.

    Args:
        ref: the environment, for the message.
        executable: its name on the PATH of this process.
        install: the command that installs it, for the message.
        place: where it is instead.

    Raises:
        ReferenceNotFoundError: it is not there.
    """
    folders = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))
    found = shutil.which(place or executable, path=folders)
    if found is None:
        where = f"{place} is no program" if place else f"there is no program {executable!r} on the PATH of this worker"
        raise ReferenceNotFoundError(
            f"{ref}: {where}; install it (`{install}`), or say where it is: "
            f'args = {{ command = "/path/to/{executable}" }}'
        )
    path = Path(os.path.realpath(found))
    interpreter, is_searched = _interpreter(path)
    readable, search_path = [str(_package(path))], list(_SEARCHED)
    if interpreter is not None:
        own = interpreter_paths(str(interpreter)) if interpreter.name.startswith("python") else ()
        readable += dict.fromkeys((str(interpreter), os.path.realpath(interpreter), *own))
        search_path += [str(interpreter.parent)] if is_searched else []
    return InstalledProgram(str(path), tuple(readable), os.pathsep.join(dict.fromkeys(search_path)))


def _package(path: Path) -> Path:
    """Return the outermost `node_modules` or the virtual environment that a file belongs to; else the file."""
    for folder in reversed(path.parents):
        if folder.name == "node_modules" or (folder / "pyvenv.cfg").is_file():
            return folder
    return path


def _interpreter(path: Path) -> tuple[Path | None, bool]:
    """Return what runs a script, and whether it is searched on the PATH; no path for a binary."""
    with path.open("rb") as file:
        words = file.readline(_MAX_SHEBANG).decode("utf-8", "replace").split()
    if not words or not words[0].startswith("#!"):
        return None, False
    is_searched = Path(words[0]).name == "env"
    names = [word for word in words[1:] if not word.startswith("-")] if is_searched else [words[0].removeprefix("#!")]
    found = shutil.which(names[0]) if names else None
    return (Path(found).absolute() if found else None), is_searched
