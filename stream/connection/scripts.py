"""The Lua scripts of `stream/lua/`, as they are sent to the server."""

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "lua"
_COMMON = "common"


@cache
def load_script(name: str) -> str:
    """Return a script, with `common.lua` inserted after its first line, which holds its flags. Blocks on files."""
    return (_FOLDER / f"{name}.lua").read_text().replace("\n", f"\n{_load_common()}", 1)


@cache
def load_scripts() -> dict[str, str]:
    """Return all scripts by name. Blocks on files; later calls do not."""
    names = (file.stem for file in _FOLDER.glob("*.lua"))
    return {name: load_script(name) for name in names if name != _COMMON}


@cache
def _load_common() -> str:
    return (_FOLDER / f"{_COMMON}.lua").read_text()
