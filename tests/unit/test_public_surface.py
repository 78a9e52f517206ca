"""What `stream` must not import, and its scripts."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from stream.connection import keys

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(("package", "above"), [("stream", {"envs", "workers"}), ("envs", {"workers"})])
def test_imports_run_one_way(package, above):
    for path in (REPOSITORY / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & above, path


def test_stream_loads_nothing_heavy():
    modules = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in (REPOSITORY / "stream").rglob("*.py")
    ]
    code = f"import importlib, json, sys\nfor name in {modules}: importlib.import_module(name)\n"
    code += "print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
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
