"""Ensure that Penstock's `stream`, `envs` and `workers` are imported: a project may have packages with these names."""

import sys
from importlib.util import find_spec
from pathlib import Path

from workers.cli.command_error import CommandError

_ROOT = Path(__file__).resolve().parents[2]


def put_working_directory_last() -> None:
    """Move the working directory to the end of `sys.path`, so that a project's folder `envs/` hides no package.

    `python -m workers`, or a PYTHONPATH that contains the working directory, puts it first.
    """
    here = Path.cwd()
    entries = [entry for entry in sys.path if Path(entry or ".").resolve() == here]
    if entries and here != _ROOT:
        others = [entry for entry in sys.path if entry not in entries]
        sys.path[:] = [*others, *({str(_ROOT)} - set(others)), str(here)]


def check_package_origin() -> None:
    """Check that `stream` and `envs` lie beside `workers`.

    Raises:
        CommandError: a package is missing, or hidden by another; names the folder that hides it.
    """
    for name in ("stream", "envs"):
        spec = find_spec(name)
        origins = [] if spec is None else [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
        if not origins:
            raise CommandError(f"the package {name!r} is missing beside {_ROOT / 'workers'}; install penstock again")
        found = Path(str(origins[0])).resolve()
        folder = found.parent if found.name == "__init__.py" else found
        if folder != _ROOT / name:
            raise CommandError(
                f"{folder} hides penstock's own package {name!r}, which is {_ROOT / name}; rename it, uninstall it, or "
                "take its folder off PYTHONPATH"
            )
