"""Our three packages bear common names: see that they are ours, and that a project's own do not hide them."""

import sys
from importlib.util import find_spec
from pathlib import Path

from workers.cli.failures import CommandError


def put_working_directory_last() -> None:
    """Put the working directory behind everything else: a project may have a folder `envs/` of its own there.

    It comes first with `python -m workers`, or with a PYTHONPATH that names it.
    """
    here, ours = Path.cwd(), Path(__file__).resolve().parents[2]
    entries = [entry for entry in sys.path if Path(entry or ".").resolve() == here]
    if entries and here != ours:
        others = [entry for entry in sys.path if entry not in entries]
        sys.path[:] = [*others, *({str(ours)} - set(others)), str(here)]


def check_package_origin() -> None:
    """See that our three packages come from one place: their names are common ones.

    Raises:
        Failure: names the intruder.
    """
    ours = Path(__file__).resolve().parents[2]
    for name in ("stream", "envs"):
        spec = find_spec(name)
        places = [] if spec is None else [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
        if not places:
            raise CommandError(f"the package {name!r} is missing beside {ours / 'workers'}; install penstock again")
        found = Path(str(places[0])).resolve()
        folder = found.parent if found.name == "__init__.py" else found
        if folder != ours / name:
            raise CommandError(
                f"{folder} hides penstock's own package {name!r}, which is {ours / name}; rename it, uninstall it, or "
                "take its folder off PYTHONPATH"
            )
