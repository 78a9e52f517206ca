"""The package `penstock`: its names, what they say about themselves, and what importing it costs."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock
import penstock.testing
import penstock.trainer
from tests.cases.typed_example import __file__ as typed_example

ROOT = Path(__file__).parents[2]
NAMES = {
    *("check", "play", "run", "open_run", "Run", "RunSummary", "CheckReport", "Settings", "load_settings"),
    *("Prompt", "Group", "Completion", "Measured", "Unmeasured", "measure"),
    *("Environment", "AgentEnvironment", "EnvironmentFailure", "PenstockError", "SettingsError", "__version__"),
}
MODULES = [penstock, penstock.testing, penstock.trainer]


def public_members(cls: type) -> dict[str, object]:
    """Return the public methods and properties that one of our classes defines, by name."""
    members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items() if is_ours(base)}
    kinds = (property, classmethod, staticmethod)
    return {
        name: member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        for name, member in members.items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, kinds))
    }


def is_ours(thing: type) -> bool:
    return thing.__module__.partition(".")[0] in {"stream", "envs", "workers"}


def callables(module) -> dict[str, object]:
    """Return the functions of a module's face, and the public methods and properties of its classes, by name."""
    found = {}
    for name in set(module.__all__) - {"__version__"}:
        value = getattr(module, name)
        members = public_members(value) if inspect.isclass(value) else {"": value}
        found |= {f"{name}.{member}".rstrip("."): function for member, function in members.items()}
    return found


CALLABLES = [(f"{module.__name__}.{name}", each) for module in MODULES for name, each in callables(module).items()]


def test_the_names_are_these_and_each_can_be_imported():
    assert len(NAMES) == 21
    assert set(penstock.__all__) == NAMES
    assert sorted(penstock.__all__) == penstock.__all__
    assert set(dir(penstock)) >= NAMES
    for name in NAMES:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        getattr(penstock, "missing")  # noqa: B009  (the attribute is asked for on purpose)


def test_a_type_checker_sees_what_is_imported():
    """The homes of names for a type checker, and those of names at run time, are the same."""
    block = next(node for node in ast.parse(Path(penstock.__file__).read_text()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module != "importlib.metadata"]
    assert {node.module: tuple(alias.name for alias in node.names) for node in imports} == penstock._HOMES


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_name_is_documented(module):
    assert module.__doc__
    for name in set(module.__all__) - {"__version__"}:
        text = getattr(module, name).__doc__ or ""
        assert re.match(r"[A-Z][^\n]+[.:]($|\n)", text), f"{name}: {text[:80]!r}"


@pytest.mark.parametrize(("name", "function"), CALLABLES, ids=[name for name, _ in CALLABLES])
def test_every_function_and_method_is_documented_and_annotated(name, function):
    text = inspect.getdoc(function) or ""
    assert text, name
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty, name
    for parameter in list(signature.parameters.values()):
        if parameter.name not in ("self", "cls"):
            assert parameter.annotation is not parameter.empty, f"{name}: {parameter.name}"


@pytest.mark.parametrize("name", ["check", "play", "run", "open_run", "load_settings", "measure", "Run.groups"])
def test_every_parameter_is_explained(name):
    function = callables(penstock)[name]
    explained = re.findall(r"^ {4}(\w+): ", inspect.getdoc(function), re.MULTILINE)
    assert set(inspect.signature(function).parameters) - {"self"} <= set(explained)


@pytest.mark.timeout(300)
def test_a_typed_example_passes_a_strict_type_checker():
    """The example names all of the face; the checker's cache is that of `make check`."""
    code = Path(typed_example).read_text()
    assert {*re.findall(r"penstock\.(\w+)", code)} >= NAMES
    assert {*penstock.testing.__all__} <= {*re.findall(r"\w+", code)}
    command = [sys.executable, "-m", "mypy", "--strict", typed_example]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_it_is_shipped_as_typed():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("penstock", "stream", "envs", "workers"):
        assert "py.typed" in data[package]
        assert (ROOT / package / "py.typed").is_file()
