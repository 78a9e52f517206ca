import sys

import pytest
from structlog.testing import capture_logs

from envs.factory import EnvironmentFactory
from envs.references import Reference
from stream.errors import SettingsError
from tests.cases.chats import TEMPLATE, model_folder
from workers.rollout.chat.chat_setup import load_chat_setups
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings.toml_file import parse_settings

CALLING = TEMPLATE.replace(
    "+ message.content + '<|im_end|>",
    "+ message.content }}{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + "
    "'</tool_call>' }}{%- endfor %}{{- '<|im_end|>",
)
FORGETFUL = CALLING.replace("+ message.content }}", "+ message.content.split('</think>')[-1] }}")


class Adder:
    def reset(self, **row): ...

    def add(self, a: int, b: int) -> int:
        return a + b


class Quiz:
    def reset(self, **row): ...


def factories(**classes):
    return {
        name: EnvironmentFactory(Reference("test", "module", cls, sys.modules[__name__]), cls, cls())
        for name, cls in classes.items()
    }


def settings(folder, **model):
    rest = {"data": {"path": "p"}, "rewards": [{"ref": "a:b"}]}
    return parse_settings({"run": {"name": "r"}, "model": {"path": str(folder), **model}} | rest)


@pytest.fixture
def folder(tmp_path):
    (model_folder(tmp_path) / "chat_template.jinja").write_text(CALLING)
    return tmp_path


def test_the_log_names_the_tool_format_and_that_conversations_continue(folder):
    with capture_logs() as logs:
        setups = load_chat_setups(settings(folder), folder, factories(adder=Adder))
    (line,) = logs
    assert (line["event"], line["environment"]) == ("template.inspected", "adder")
    assert (line["tool_format"], line["history"]) == ("hermes", "continue")
    assert "writes a call as" in line["tool_format_why"]
    assert (setups["adder"].chat.rewrites_history, setups["adder"].tool_format) == (False, TOOL_FORMATS["hermes"])


def test_the_log_says_that_conversations_fork_and_shows_the_first_difference(folder):
    (folder / "chat_template.jinja").write_text(FORGETFUL)
    with capture_logs() as logs:
        setups = load_chat_setups(settings(folder), folder, factories(adder=Adder))
    (line,) = logs
    assert line["history"] == "fork"
    assert "first difference at character" in line["history_why"]
    assert setups["adder"].chat.rewrites_history


def test_a_format_named_in_the_settings_is_used(folder):
    with capture_logs() as logs:
        setups = load_chat_setups(settings(folder, tool_format="pythonic"), folder, factories(adder=Adder))
    assert setups["adder"].tool_format is TOOL_FORMATS["pythonic"]
    assert logs[0]["tool_format_why"] == "set by model.tool_format"


def test_a_template_without_tool_calls_is_an_error_only_if_there_are_tools(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(SettingsError, match=r"neither writes tool calls.*set model\.tool_format"):
        load_chat_setups(settings(folder), folder, factories(adder=Adder))
    with capture_logs() as logs:
        setups = load_chat_setups(settings(folder), folder, factories(quiz=Quiz))
        alone = load_chat_setups(settings(folder), folder, {})
    assert (list(setups), list(alone), logs) == (["quiz"], [None], [])


def test_a_template_that_omits_the_tools_is_reported(folder):
    (folder / "chat_template.jinja").write_text(CALLING.replace("(tool | tojson)", "'?'"))
    with capture_logs() as logs:
        load_chat_setups(settings(folder), folder, factories(adder=Adder))
    assert [line["event"] for line in logs] == ["template.tools_not_rendered", "template.inspected"]
