"""What the children of a process pool find of this machine: all of it, none of the worker's environment, or a sandbox.

==========  ==========================================================================================================
`none`      the worker's environment, its files and network: for reward functions of users
`process`   no variable of the worker's environment; files and network as the worker has them
`sandbox`   `envs.sandboxes.bubblewrap`: no network, no process and no file but the system's and installed packages
==========  ==========================================================================================================
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from envs.sandboxes.bubblewrap import BubblewrapSpec, Launch, import_paths, launch, sandbox_problem, shows
from envs.sandboxes.pools.child_main import ChildConfig

IsolationKind = Literal["none", "process", "sandbox"]

# The child gets the parent's import path, so both import the same modules.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from envs.sandboxes.pools.child_main import main; main()"
_ROOT = str(Path(__file__).resolve().parents[3])
"""Where our packages are, should this process have found them in its working folder."""
_VARIABLES = (
    ("PYTHONHASHSEED", "0"),  # what depends on the order of a set is the same in every child
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("OMP_NUM_THREADS", "1"),  # a thread pool would not survive a fork
    ("OPENBLAS_NUM_THREADS", "1"),
)


@dataclass(frozen=True)
class Isolation:
    """How a pool starts its children."""

    kind: IsolationKind = "none"
    readable: tuple[str, ...] = ()
    """Paths that a sandbox shows in addition to installed packages."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of isolated children."""

    def launch(self, config: ChildConfig) -> Launch:
        """Prepare the start of a child; blocks."""
        if self.kind == "sandbox":
            shown, variables = (*import_paths(), *self.readable), (*_VARIABLES, *self.variables)
            spec = BubblewrapSpec(readable=shown, variables=variables)
            config = msgspec.structs.replace(config, parent_pid=0)  # it has another number there
            found = [path for path in sys.path if shows(spec, path)]
            return launch(_command(config, [*dict.fromkeys([*found, _ROOT])]), spec)
        if self.kind == "none":
            return Launch(_command(config, sys.path))
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        variables = (*_VARIABLES, *self.variables)
        return Launch(_command(config, sys.path), {"env": {"LANG": "C.UTF-8", **kept, **dict(variables)}})


NO_ISOLATION = Isolation()


def strongest_isolation() -> IsolationKind:
    """Return what this machine can do for code that needs nothing of it. Blocks for the first call."""
    return "process" if sandbox_problem() else "sandbox"


def is_importable_in_sandbox(module: str) -> bool:
    """Return whether a child in a sandbox can import a module that this process has imported. Blocks."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return bool(file) and shows(BubblewrapSpec(readable=import_paths()), str(file))


def _command(config: ChildConfig, path: list[str]) -> list[str]:
    return [sys.executable, "-c", _PROGRAM, msgspec.json.encode(config).decode(), *path]
