"""Resolve references: strings in the settings that name an environment or a reward function.

===========================  ==========================================================================================
`calculator`                 an entry point, in group `penstock.environments` or `penstock.rewards`
`package.module:attr`        an importable module; the working directory is at the end of the import path
`path/to/file.py:attr`       a file, relative to the working directory; its folder is at the end of the import path
`openenv:ws://host:port`     a server, by the name of an adapter (`ADAPTERS`) and an address
`agent:claude-code`          a program that runs its own loop, by the name of a profile; any one: `agent:command`
===========================  ==========================================================================================

One kind never falls back to another. Folders are appended to the import path, and a project's own `stream/`, `envs/` or
`workers/` is joined to the package of that name (`project_packages`). Only settings are resolved, never data from the
network.

`import_extra` imports a library that only some environments need, or names the extra to install.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Literal, NoReturn

from envs import project_packages
from envs.call import describe_error
from stream.errors import PenstockError, ReferenceNotFoundError

ReferenceKind = Literal["entry point", "module", "file", "address"]

ADAPTERS = {
    "openenv": "envs.adapters.openenv:openenv",
    "verifiers": "envs.adapters.verifiers:VerifiersServer",
    "mcp": "envs.adapters.mcp_tools:McpTools",
    "agent": "envs.programs.agent_program:agent_program",
}
"""Adapter classes by the word before the address; their first argument is the address."""

AGENTS = ("agent:command", "agent:claude-code", "agent:codex", "agent:opencode", "agent:mini-swe-agent")
"""Environments that start a program."""

_GROUP_DESCRIPTIONS = {
    "penstock.environments": "an environment, which belongs in [environments]",
    "penstock.rewards": "a reward function, which belongs in [[rewards]]",
}
"""What the entry points of each group name, for error messages."""

_FILE_MODULE_PREFIX = "penstock_plugin_"
_loading = RLock()


@dataclass(frozen=True)
class Reference:
    """A resolved reference."""

    ref: str
    kind: ReferenceKind
    target: object
    module: ModuleType
    """The module in which the target was found."""


def resolve(ref: str, group: str | None) -> Reference:
    """Find the object that a reference names.

    Args:
        ref: a reference of any kind in the module's table.
        group: the entry point group in which plain names are looked up; None refuses plain names.

    Raises:
        ReferenceNotFoundError: the message says how the reference was read and what was found instead.
    """
    adapter, _, address = ref.partition(":")
    if "://" in address or ref in AGENTS:
        return _from_address(ref, adapter, address)
    place, colon, attribute = ref.rpartition(":")
    if colon and place and attribute:
        if place.endswith(".py"):
            return _from_file(ref, place, attribute)
        if "/" in place or "\\" in place:
            raise ReferenceNotFoundError(f"{ref!r} was read as a file, but {place!r} does not end in .py")
        return _from_module(ref, place, attribute)
    if ref.endswith(".py") and (names := _defined_names(Path(ref).expanduser())):
        choices = ", ".join(f"{ref}:{name}" for name in names)
        raise ReferenceNotFoundError(f"{ref!r} is a file: name a class or a function of it; it has {choices}")
    if colon or ref.endswith(".py") or "/" in ref or "\\" in ref:
        raise ReferenceNotFoundError(
            f"{ref!r} is incomplete; write package.module:name or path/to/file.py:name"
            + (", or the name of an entry point" if group else "")
        )
    return _from_entry_point(ref, group)


def check_arguments(reference: Reference, arguments: Mapping[str, object]) -> None:
    """Check that the target accepts the arguments from the settings.

    Raises:
        ReferenceNotFoundError: it does not; the message lists the arguments it accepts.
    """
    if not arguments or not callable(reference.target):
        return
    try:
        parameters = inspect.signature(reference.target).parameters.values()
    except (TypeError, ValueError):  # a C function without a signature
        return
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in arguments if name not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ReferenceNotFoundError(
            f"{reference.ref!r} takes no argument {unknown[0]!r}; args may give: {', '.join(named) or 'nothing'}"
        )


def class_key(cls: type) -> str:
    """Return `module:qualname`, the same on every machine; for a class from a file, `file.py:qualname`."""
    module = cls.__module__
    if module.startswith(_FILE_MODULE_PREFIX):
        module = module.removeprefix(_FILE_MODULE_PREFIX).rpartition("_")[0] + ".py"
    return f"{module}:{cls.__qualname__}"


def _from_entry_point(ref: str, group: str | None) -> Reference:
    if group is None:
        raise ReferenceNotFoundError(f"{ref!r} is a plain name; write package.module:name or path/to/file.py:name")
    tried = f"{ref!r} was read as an entry point of group {group!r}"
    available = entry_points(group=group)
    found = {entry.value: entry for entry in available if entry.name == ref}
    if not found:
        names = ", ".join(sorted({entry.name for entry in available})) or "none"
        hint = f"; for a module write {ref.rpartition('.')[0]}:{ref.rpartition('.')[2]}" if "." in ref else ""
        for other, place in _GROUP_DESCRIPTIONS.items():
            if other != group and entry_points(group=other, name=ref):
                hint = f"; it is the name of {place}"
        raise ReferenceNotFoundError(f"{tried}, which has no such name; installed are: {names}{hint}")
    if len(found) > 1:
        owners = ", ".join(f"{_distribution(entry)} ({value})" for value, entry in sorted(found.items()))
        raise ReferenceNotFoundError(f"{tried}, which several distributions claim: {owners}; uninstall all but one")
    (entry,) = found.values()
    module = _import(
        lambda: importlib.import_module(entry.module), f"{tried} ({entry.value}, of {_distribution(entry)})"
    )
    return Reference(ref, "entry point", _attribute(module, entry.attr, tried), module)


def _from_module(ref: str, name: str, attribute: str) -> Reference:
    tried = f"{ref!r} was read as module {name!r}"
    if not all(part.isidentifier() for part in name.split(".")):
        raise ReferenceNotFoundError(f"{tried}, which is not a valid module name; a file ends in .py")
    _append_to_path(Path.cwd())
    if reason := project_packages.conflict(name):
        raise ReferenceNotFoundError(f"{tried}, but {reason}")
    module = _import(lambda: importlib.import_module(name), tried, name)
    return Reference(ref, "module", _attribute(module, attribute, tried), module)


def _from_file(ref: str, place: str, attribute: str) -> Reference:
    path = Path(place).expanduser().resolve()
    tried = f"{ref!r} was read as file {path}"
    if not path.is_file():
        siblings = sorted(p.name for p in path.parent.glob("*.py"))[:10] if path.parent.is_dir() else None
        beside = "its folder does not exist either" if siblings is None else f"beside it: {', '.join(siblings) or '-'}"
        raise ReferenceNotFoundError(f"{tried}, which does not exist ({beside})")
    _append_to_path(path.parent)
    _append_to_path(Path.cwd())
    with _loading:  # no other thread may see the module half loaded
        module = _import(lambda: _load(path), tried)
    return Reference(ref, "file", _attribute(module, attribute, tried), module)


def _defined_names(path: Path) -> list[str]:
    """Return the public classes and functions of a file, which is not run; none if it cannot be read."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    definitions = (
        each.name for each in body if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [name for name in definitions if not name.startswith("_")]


def _from_address(ref: str, adapter: str, address: str) -> Reference:
    tried = f"{ref!r} was read as the address of a server"
    if adapter not in ADAPTERS:
        raise ReferenceNotFoundError(f"{tried}, but there is no adapter {adapter!r}; there are: {', '.join(ADAPTERS)}")
    name, _, attribute = ADAPTERS[adapter].partition(":")
    module = _import(lambda: importlib.import_module(name), tried)
    make: Callable[..., object] = getattr(module, attribute)
    return Reference(ref, "address", partial(make, address), module)


def _load(path: Path) -> ModuleType:
    """Load a file once, under a unique module name, so that a second reference finds the same classes."""
    name = f"{_FILE_MODULE_PREFIX}{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python has no loader for {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _append_to_path(folder: Path) -> None:
    """Append a folder to the import path, and its `stream/`, `envs/` and `workers/` to the packages of these names."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    project_packages.join()


def _import(load: Callable[[], ModuleType], tried: str, name: str = "") -> ModuleType:
    try:
        return load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may even call sys.exit
        wanted = error.name or "" if isinstance(error, ImportError) else ""
        if reason := project_packages.conflict(wanted):
            raise ReferenceNotFoundError(f"{tried}; it imports {wanted!r}, but {reason}") from error
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise ReferenceNotFoundError(
                f"{tried}, but there is no module {missing!r} (looked in the installed ones and in {Path.cwd()}); "
                "install it, or write the path of a .py file"
            ) from error
        _raise_import_error(tried, error)


def _raise_import_error(tried: str, error: BaseException) -> NoReturn:
    """Raise an error that names the failing line: the last one outside the import machinery."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    lines = [f for f in frames if f.filename != __file__]
    where = f" ({lines[-1].filename}, line {lines[-1].lineno})" if lines else ""
    raise ReferenceNotFoundError(f"{tried}; importing it raised {describe_error(error)}{where}") from error


def _attribute(module: ModuleType, dotted: str, tried: str) -> object:
    """Look up a dotted name in a module."""
    target: object = module
    for name in dotted.split("."):
        try:
            target = getattr(target, name)
        except AttributeError as error:
            file = getattr(module, "__file__", None) or "no file"
            where = f"it ({file})" if target is module else repr(target)
            raise ReferenceNotFoundError(f"{tried}; {where} has no {name!r}; {_suggestions(target, name)}") from error
    return target


def _suggestions(target: object, name: str) -> str:
    own = [n for n, v in vars(target).items() if _is_suggestible(n, v, target)] if hasattr(target, "__dict__") else []
    close = difflib.get_close_matches(name, own, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"it defines: {', '.join(sorted(own)[:20]) or 'no public callables'}"


def _is_suggestible(name: str, value: object, target: object) -> bool:
    """Return whether a name is worth suggesting: public, callable, and defined there rather than imported."""
    home = getattr(value, "__module__", None)
    imported = inspect.ismodule(target) and home != target.__name__
    return not name.startswith("_") and callable(value) and not imported


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


class MissingExtraError(PenstockError, ImportError):
    """A library is not installed; the message names the extra that installs it."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a library of an optional extra.

    Args:
        module: name of the module.
        extra: the extra of this distribution that installs it.

    Raises:
        MissingExtraError: the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise missing_extra(module, extra) from error


def missing_extra(module: str, extra: str) -> MissingExtraError:
    """Return the error for a library that is not installed."""
    return MissingExtraError(f'{module} is not installed; pip install "penstock[{extra}]"')
