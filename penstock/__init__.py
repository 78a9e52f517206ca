"""Penstock from Python: check and play an environment, start a run, read it while it runs and afterwards.

>>> import penstock
>>> penstock.check("counter.py:Counter", fields={"target": 3}).ok
True
>>> penstock.run("run.toml", {"train.max_steps": 20})
>>> penstock.open_run("runs/my-run").metrics()

Names are imported at their first use, so `import penstock` loads neither torch nor a Redis client. Tests of
environments import `penstock.testing`; a trainer of your own imports `penstock.trainer`.
"""

import sys
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import version

    from envs.contract import AgentEnvironment, Environment, EnvironmentFailure
    from stream.errors import PenstockError, SettingsError
    from stream.records import Completion, Group, Prompt
    from stream.validity import Measured, Unmeasured, measure
    from workers.check.check import check
    from workers.check.report import CheckReport
    from workers.evaluate.play import play
    from workers.launch.run_process import run
    from workers.runs.find import open_run
    from workers.runs.run import Run
    from workers.runs.summary import RunSummary
    from workers.settings.settings import Settings
    from workers.settings.toml_file import load_settings

    __version__ = version("penstock")

__all__ = [
    "AgentEnvironment",
    "CheckReport",
    "Completion",
    "Environment",
    "EnvironmentFailure",
    "Group",
    "Measured",
    "PenstockError",
    "Prompt",
    "Run",
    "RunSummary",
    "Settings",
    "SettingsError",
    "Unmeasured",
    "__version__",
    "check",
    "load_settings",
    "measure",
    "open_run",
    "play",
    "run",
]

_HOMES = {
    "envs.contract": ("AgentEnvironment", "Environment", "EnvironmentFailure"),
    "stream.errors": ("PenstockError", "SettingsError"),
    "stream.records": ("Completion", "Group", "Prompt"),
    "stream.validity": ("Measured", "Unmeasured", "measure"),
    "workers.check.check": ("check",),
    "workers.check.report": ("CheckReport",),
    "workers.evaluate.play": ("play",),
    "workers.launch.run_process": ("run",),
    "workers.runs.find": ("open_run",),
    "workers.runs.run": ("Run",),
    "workers.runs.summary": ("RunSummary",),
    "workers.settings.settings": ("Settings",),
    "workers.settings.toml_file": ("load_settings",),
}
"""Public names by the module that defines them."""
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("penstock")
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load_own_packages() -> None:
    """Import `stream`, `envs` and `workers` from beside this package, even where a project has such folders, too.

    The project's folders are then joined to these packages, so that their modules can be imported as well.

    Raises:
        ImportError: another package of such a name was imported before, or one of ours is missing; names it.
    """
    root = Path(__file__).resolve().parents[1]
    for name in ("stream", "envs", "workers"):
        file = root / name / "__init__.py"
        if name in sys.modules:
            loaded = Path(getattr(sys.modules[name], "__file__", None) or "no file")
            if loaded.resolve() != file:
                raise ImportError(
                    f"the package {name!r} of {loaded.parent} was imported before penstock, which has a package "
                    "of the same name; import penstock first, or rename the folder"
                )
            continue
        spec = util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
        if spec is None or spec.loader is None:
            raise ImportError(f"the package {name!r} is missing beside {root / 'penstock'}; install penstock again")
        sys.modules[name] = module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    import_module("envs.project_packages").join()


def _show_in_notebooks() -> None:
    """Register tables of groups with IPython. Other values have a `_repr_html_`; records know nothing of screens."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return

    def as_table(group: "Group") -> str:
        from workers.runs.html import group_html

        return group_html(group)

    def in_one_line(group: "Group", printer: Any, _: bool) -> None:
        from workers.runs.html import group_line

        printer.text(group_line(group))

    formatters = shell.display_formatter.formatters
    formatters["text/html"].for_type_by_name("stream.records", "Group", as_table)
    formatters["text/plain"].for_type_by_name("stream.records", "Group", in_one_line)


_load_own_packages()
_show_in_notebooks()
