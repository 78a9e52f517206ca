"""Join a project's own folders `stream/`, `envs/` and `workers/` to Penstock's packages of these names.

Our modules come first. A module that only the project has is found as if Penstock were not installed: `workers.util`
is the project's `workers/util.py`. Two things would go wrong in silence, and are refused instead: a module that both
have, since Penstock's would be imported, and code in the project's `__init__.py`, since it would never run.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path

NAMES = ("stream", "envs", "workers")
_ROOT = Path(__file__).resolve().parents[1]
_REMEDY = "rename the folder, or write the file: path/to/file.py:Name"


def join() -> None:
    """Make the modules of projects' packages importable below ours, except where `conflict` says why not.

    A project is every folder on the import path that holds a folder `stream/`, `envs/` or `workers/`.
    """
    for name in NAMES:
        if not (folders := _project_folders(name)):  # a child process with limits may not even see our `workers`
            continue
        package = import_module(name)
        package.__path__ = [
            *package.__path__,
            *(own for own in folders if own not in package.__path__ and not _code_of_init(Path(own))),
        ]


def conflict(module: str) -> str:
    """Return why a module of a project cannot be imported, with the remedy; empty: nothing stands in its way.

    Args:
        module: its dotted name, for example `workers.util`; every folder on the import path is looked at.
    """
    name, _, below = module.partition(".")
    if name not in NAMES or not below:
        return ""
    first = below.partition(".")[0]
    for own in (folder for folder in map(Path, _project_folders(name)) if _has_module(folder, first)):
        if line := _code_of_init(own):
            return (
                f"{own}/__init__.py, line {line}, has code, which would never run beside Penstock's {name!r}; {_REMEDY}"
            )
        if _has_module(_ROOT / name, first):
            return f"Penstock has a module {name}.{first}, too, which hides {own / first}; {_REMEDY}"
    return ""


def _project_folders(name: str) -> list[str]:
    """Return the folders of this name on the import path, without ours."""
    folders = dict.fromkeys(Path(entry or ".").resolve() / name for entry in sys.path)
    return [str(folder) for folder in folders if folder != _ROOT / name and folder.is_dir()]


def _has_module(package: Path, name: str) -> bool:
    return (package / f"{name}.py").is_file() or (package / name).is_dir()


def _code_of_init(package: Path) -> int:
    """Return the first line with code in a package's `__init__.py`; 0: there is none, or no such file.

    A docstring and the usual line that extends `__path__` are no code that anybody would miss.
    """
    file = package / "__init__.py"
    if not file.is_file():
        return 0
    for statement in ast.parse(file.read_bytes()).body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        extends_path = "extend_path" in ast.unparse(statement)
        if not (is_text or extends_path or isinstance(statement, ast.Pass) or _imports_pkgutil(statement)):
            return statement.lineno
    return 0


def _imports_pkgutil(statement: ast.stmt) -> bool:
    names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
    return names == ["pkgutil"] or (isinstance(statement, ast.ImportFrom) and statement.module == "pkgutil")
