"""Environments that declare their tools, and adapters whose libraries are missing."""

import sys

import anyio
import pytest

from envs.call import CallRunner
from envs.contract import AgentEnvironment, declares_tools
from envs.factory import EnvironmentFactory
from envs.references import MissingExtraError, import_extra
from stream.errors import EnvironmentFailure, ReferenceNotFoundError
from stream.records import Failure
from tests.cases.checks import tried
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.tool_formats.parsing import ToolCall
from workers.rollout.tool_result import ToolResult

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


class Declaring:
    """Declares the tools of a server; `helper` is not a tool."""

    schemas = (ADD,)

    def reset(self):
        self.asked = []

    async def tool_schemas(self):
        await anyio.lowlevel.checkpoint()
        return list(self.schemas)

    async def call_tool(self, name, arguments):
        self.asked.append((name, arguments))
        if "gone" in arguments:
            raise EnvironmentFailure("the server is gone")
        return arguments["a"] + 1

    def helper(self):
        """Not a tool."""


class OnlyOne:
    """As in TRL, a method with the name `call_tool` is an ordinary tool."""

    def reset(self):
        pass

    def call_tool(self, number: int) -> int:
        """Call.

        Args:
            number: of the tool
        """
        return number


class Leading(AgentEnvironment):
    """Runs its own agent loop."""

    def reset(self):
        pass

    async def run_episode(self, endpoint, sampling):
        pass


def load(cls):
    return EnvironmentFactory.load(f"{__name__}:{cls.__name__}")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


async def called(**arguments):
    factory = await anyio.to_thread.run_sync(load, Declaring)
    slot = EnvironmentSlot("it", factory, CallRunner(anyio.CapacityLimiter(2)))
    await slot.reset({}, 0, 0, 5)
    return [await slot.call_tool(ToolCall(name, arguments, ""), 5) for name in ("add", "helper")]


def test_declared_tools_are_the_tools_and_methods_are_not():
    factory = load(Declaring)
    assert [tool.name for tool in factory.tools] == ["add"]
    assert factory.tools[0].schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert factory.declares_tools


async def test_a_declared_tool_is_called_by_name_with_the_models_arguments():
    answer, unknown = await called(a=1)
    assert answer == ToolResult("2")
    assert unknown.is_error
    assert "there is no tool 'helper'" in unknown.text


async def test_a_declared_tools_error_is_text_and_an_environment_failure_is_not():
    assert (await called(b=1))[0].text == "Error: KeyError: 'a'"
    assert isinstance((await called(gone=1))[0], Failure)


def test_thawing_snapshots_requests_no_tools(monkeypatch):
    monkeypatch.setattr(Declaring, "tool_schemas", lambda self: pytest.fail("it was asked"))
    factory = EnvironmentFactory.load(f"{__name__}:Declaring", with_tools=False)
    assert factory.tools == []
    assert (
        EnvironmentFactory.load("openenv:ws://127.0.0.1:9", with_tools=False).environment_class.__name__
        == "RewardedOpenEnv"
    )


def test_check_tries_environments_with_their_own_loop():
    (error,) = tried(f"{__name__}:Leading").errors
    assert "ended without a turn of the model" in error


def test_tool_schemas_or_call_tool_alone_is_an_ordinary_tool():
    assert not declares_tools(OnlyOne())
    assert [tool.name for tool in load(OnlyOne).tools] == ["call_tool"]


def test_an_environment_with_its_own_loop_has_no_tools():
    factory = load(Leading)
    assert factory.runs_own_loop
    assert factory.tools == []


@pytest.mark.parametrize("schemas", [[{"name": "add"}], [ADD, ADD], ["add"], [{"function": {"name": ""}}]])
def test_schemas_in_another_form_are_refused_at_start(monkeypatch, schemas):
    monkeypatch.setattr(Declaring, "schemas", schemas)
    with pytest.raises(ReferenceNotFoundError, match="not a tool with a unique name in OpenAI's form"):
        load(Declaring)


def test_a_missing_library_names_the_extra():
    with pytest.raises(MissingExtraError, match=r'no_such_library is not installed; pip install "penstock\[openenv\]"'):
        import_extra("no_such_library", "openenv")


def test_a_missing_import_within_a_library_is_reported_unchanged(tmp_path, monkeypatch):
    (tmp_path / "half_a_library.py").write_text("import no_such_part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_part") as raised:
        import_extra("half_a_library", "mcp")
    assert not isinstance(raised.value, MissingExtraError)
