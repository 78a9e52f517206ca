"""The public names of `stream`, and what it must not import."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import stream
from stream.connection import keys

REPOSITORY = Path(__file__).parents[2]


def test_exports_are_listed_in_all():
    tree = ast.parse(Path(stream.__file__).read_text())
    imported = {
        alias.name: node.module
        for guard in tree.body
        if isinstance(guard, ast.If)  # TYPE_CHECKING
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert stream.__all__ == sorted(imported)
    lazy = {name: module for module, names in stream._NAMES.items() for name in names}
    assert imported == lazy, "what type checkers see is what is imported at first use"


@pytest.mark.parametrize("name", stream.__all__)
def test_every_public_name_is_documented(name):
    result = getattr(stream, name)
    assert inspect.getdoc(result)
    if inspect.isclass(result):
        methods = [m for n, m in vars(result).items() if not n.startswith("_") and inspect.isfunction(m)]
        assert [m.__qualname__ for m in methods if not m.__doc__] == []


@pytest.mark.parametrize(("package", "above"), [("stream", {"envs", "workers"}), ("envs", {"workers"})])
def test_imports_run_one_way(package, above):
    for path in (REPOSITORY / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & above, path


def test_stream_loads_nothing_heavy():
    code = "import json, sys; from stream import *; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not set(loaded) & {"torch", "transformers", "vllm", "numpy", "aiohttp", "envs", "workers"}


def test_every_script_begins_with_its_flags():
    for script in (REPOSITORY / "stream" / "lua").glob("*.lua"):
        if script.name != "common.lua":
            assert script.read_text().startswith("#!lua"), script


def test_every_script_is_used():
    code = "".join(path.read_text() for path in (REPOSITORY / "stream").rglob("*.py"))
    for script in (REPOSITORY / "stream" / "lua").glob("*.lua"):
        assert script.stem == "common" or f'"{script.stem}"' in code, script


def test_all_keys_of_a_run_share_one_slot_of_a_cluster():
    assert keys.key("run", "prompts") == "{run}:prompts"
