import re

import pytest

from stream.errors import DataError, PenstockError
from tests.cases.chats import ADD, TEMPLATE, model_folder
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.history_check import check_history


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path)


# Drops the reasoning of all turns but the last, as some models' templates do.
FORGETFUL = TEMPLATE.replace(
    "+ message.content + '<|im_end|>",
    "+ (message.content.split('</think>')[-1] if message.role == 'assistant' else message.content) + '<|im_end|>",
)


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("\\n<tool_response>\\n", "<tool_response>")])
def test_a_template_that_only_appends_passes_the_check(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    assert not check_history(ChatTokenizer.load(folder, {}, [ADD]).renderer).rewrites_history


THINK = "'<|im_start|>assistant\\n<think>\\n' }}"
NO_THINK = "'<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
NO_THINK_IN_HISTORY = (
    "+ '\\n' + ('<think>\\n\\n</think>\\n\\n' if message.role == 'assistant' else '') + message.content"
)


@pytest.mark.parametrize(
    ("begin", "history", "passes"),
    [
        (THINK, "+ '\\n' + message.content", True),  # opens the reasoning, and keeps it afterwards
        (NO_THINK, NO_THINK_IN_HISTORY, True),  # writes an empty block, in earlier turns too
        (NO_THINK, "+ '\\n' + message.content", False),  # writes an empty block, but not in earlier turns
    ],
)
def test_a_template_that_opens_or_skips_reasoning_must_do_so_consistently(folder, begin, history, passes):
    template = TEMPLATE.replace("'<|im_start|>assistant\\n' }}", begin).replace("+ '\\n' + message.content", history)
    assert begin in template
    assert history in template
    (folder / "chat_template.jinja").write_text(template)
    chat = ChatTokenizer.load(folder, {}, [ADD])
    assert check_history(chat.renderer).rewrites_history is not passes


def test_a_template_that_drops_earlier_reasoning_forks_and_the_reason_shows_where(folder):
    (folder / "chat_template.jinja").write_text(FORGETFUL)
    history = check_history(ChatTokenizer.load(folder, {}, [ADD]).renderer)
    assert history.rewrites_history
    assert re.search(r"first difference at character \d+: the whole says .*<think>", history.reason)


def test_a_difference_in_line_breaks_does_not_fork_but_is_reported(folder):
    spaced = TEMPLATE.replace("'\\n</tool_response>'", "'\\n</tool_response>' + ('' if loop.last else '\\n')")
    assert spaced != TEMPLATE
    (folder / "chat_template.jinja").write_text(spaced)
    history = check_history(ChatTokenizer.load(folder, {}, [ADD]).renderer)
    assert not history.rewrites_history
    assert history.reason.startswith("only white space differs")


def test_a_template_that_ends_no_turn_forks(folder):
    endless = TEMPLATE.replace("+ message.content + '<|im_end|>\\n'", "+ message.content + '\\n'")
    assert endless != TEMPLATE
    (folder / "chat_template.jinja").write_text(endless)
    history = check_history(ChatTokenizer.load(folder, {}, [ADD]).renderer)
    assert history.rewrites_history
    assert "without a special token" in history.reason


def test_a_template_that_omits_tool_messages_is_refused(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("+ message.content + '\\n</tool_response>'", ""))
    with pytest.raises(PenstockError, match="leaves out tool messages"):
        check_history(ChatTokenizer.load(folder, {}, [ADD]).renderer)


def test_a_template_that_refuses_tool_messages_is_quoted(folder):
    refusing = TEMPLATE.replace("{%- if loop.first or", "{{ raise_exception('no tools here') }}{%- if loop.first or")
    (folder / "chat_template.jinja").write_text(refusing)
    chat = ChatTokenizer.load(folder, {}, [ADD])
    with pytest.raises(DataError, match="roles user, assistant, tool: TemplateError: no tools here"):
        check_history(chat.renderer)
