"""Profiles of agent programs: a stand-in takes the place of each program, and says what it was given."""

import json
import re
import tomllib

import anyio
import pytest

from envs.factory import EnvironmentFactory
from envs.programs.installed import find_program
from envs.programs.profiles import PROFILES, context_values
from envs.references import AGENTS
from envs.sandboxes.bubblewrap import sandbox_problem
from envs.snapshot import thaw
from stream.errors import ReferenceNotFoundError
from tests.adapters.episodes import completions
from tests.unit.test_episode import Scripted

needs_sandbox = pytest.mark.skipif(bool(sandbox_problem()), reason=f"needs sandboxes: {sandbox_problem()}")

STAND_IN = """#!/usr/bin/env python3
import json, os, sys, urllib.request
from pathlib import Path
url = "http://127.0.0.1:8000/v1/chat/completions"
files = {str(p): p.read_text() for p in Path.home().rglob("*") if p.is_file() and "work" not in p.parts}
key = os.environ["OWN_KEY"]
body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
beside = (Path(__file__).parent / "beside.txt").read_text()
given = {"argv": sys.argv, "env": dict(os.environ), "files": files, "beside": beside, "stdin": sys.stdin.read()}
print(json.dumps(given))
"""
"""A program of npm: a script in a package, beside a file of the package."""


class Long(Scripted):
    """A sampler of engines that take so many tokens."""

    context_length = 40_000


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a stand-in for each program, as npm does: a package, and a link on the PATH."""
    package, folder = tmp_path / "lib" / "node_modules" / "pkg", tmp_path / "bin"
    package.mkdir(parents=True)
    folder.mkdir()
    (package / "beside.txt").write_text("read")
    for profile in PROFILES.values():
        (package / profile.executable).write_text(STAND_IN)
        (package / profile.executable).chmod(0o755)
        (folder / profile.executable).symlink_to(f"../lib/node_modules/pkg/{profile.executable}")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return package


async def given_to(name, **args):
    """Run an episode; returns what the stand-in says that it was given."""
    args = {"env": {"OWN_KEY": "{key}"}} | args
    factory = await anyio.to_thread.run_sync(EnvironmentFactory.load, f"agent:{name}", args)
    (completion,) = await completions(factory, Long(["one"]))
    assert completion.failure is None, completion.failure
    return json.loads(thaw(completion.snapshot, factory).output)


def test_each_profile_has_a_reference():
    assert set(AGENTS) == {"agent:command", *(f"agent:{name}" for name in PROFILES)}


@needs_sandbox
@pytest.mark.parametrize("name", PROFILES)
async def test_a_program_finds_its_files_its_key_and_no_open_placeholder(name, installed):
    given = await given_to(name)
    profile = PROFILES[name]
    assert given["beside"] == "read"
    assert "Go." in given["argv"][-1] + given["stdin"]
    assert set(profile.env) <= set(given["env"])
    assert {f"/sandbox/{path}" for path in profile.files} <= set(given["files"])
    texts = [*given["argv"], *given["env"].values(), *given["files"].values()]
    assert not [text for text in texts if re.search(r"\{\w+\}", text)]


@needs_sandbox
async def test_codex_and_opencode_know_the_length_of_the_context(installed):
    config = tomllib.loads((await given_to("codex"))["files"]["/sandbox/.codex/config.toml"])
    assert (config["model_context_window"], config["model_auto_compact_token_limit"]) == (40_000, 28_000)
    given = json.loads((await given_to("opencode"))["env"]["OPENCODE_CONFIG_CONTENT"])
    limit = given["provider"]["penstock"]["models"]["policy"]["limit"]
    assert limit == {"context": 40_000, "output": 5_000}
    assert (await given_to("claude-code"))["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"


def test_without_a_reported_length_there_is_one_and_an_answer_leaves_room():
    assert context_values({})["context_length"] == "131072"
    assert context_values({"context_length": 1000, "max_tokens": 5000})["max_tokens"] == "500"


@needs_sandbox
async def test_the_command_the_environment_and_the_place_can_be_given(installed, monkeypatch):
    given = await given_to(
        "codex", command=["codex", "exec", "--json", "{prompt}"], env={"OWN_KEY": "{key}", "FLAG": "{max_result}"}
    )
    assert given["argv"][1:] == ["exec", "--json", "Go."]
    assert given["env"]["FLAG"] == "4000"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    given = await given_to("codex", command=str(installed / "codex"))
    assert given["argv"][0] == str(installed / "codex")
    assert given["argv"][1] == "exec"


def test_a_program_that_is_not_installed_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ReferenceNotFoundError, match=r"no program 'claude'.*npm install.*claude-code.*command = "):
        find_program("agent:claude-code", "claude", PROFILES["claude-code"].install)
    with pytest.raises(ReferenceNotFoundError, match="/nowhere/codex is no program"):
        find_program("agent:codex", "codex", "", "/nowhere/codex")


def test_a_program_of_pip_needs_its_virtual_environment_and_the_interpreter_below(tmp_path):
    home = tmp_path / "venv"
    (home / "bin").mkdir(parents=True)
    (home / "pyvenv.cfg").write_text("")
    (home / "bin" / "python").symlink_to("/usr/bin/env")
    (home / "bin" / "mini").write_text(f"#!{home}/bin/python\n")
    (home / "bin" / "mini").chmod(0o755)
    found = find_program("agent:mini-swe-agent", "mini", "", str(home / "bin" / "mini"))
    assert found.path == str(home / "bin" / "mini")
    assert found.readable[0] == str(home)
    assert {f"{home}/bin/python", "/usr/bin/env"} <= set(found.readable)


def test_a_binary_needs_itself_alone(tmp_path):
    (tmp_path / "claude").write_bytes(b"\x7fELF")
    (tmp_path / "claude").chmod(0o755)
    found = find_program("agent:claude-code", "claude", "", str(tmp_path / "claude"))
    assert found.readable == (str(tmp_path / "claude"),)
