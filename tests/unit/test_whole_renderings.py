"""What the engine gets is what the template writes for the whole conversation, wherever that template looks."""

from pathlib import Path

import pytest

from tests.cases.chats import ADD, TEMPLATE, make_tokenizer
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.known_parts import KnownParts
from workers.rollout.chat.renderer import AssistantTurn, ConversationRenderer
from workers.rollout.chat.template import ChatTemplate

ASK = {"role": "user", "content": "What is 1 + 2?"}


def tool(content, number=1, name="add"):
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05}", "content": content}


def user(content):
    return {"role": "user", "content": content}


def chat_with(template, tools=(ADD,)):
    tokenizer = make_tokenizer()
    eos = {tokenizer.token_to_id("<|im_end|>")}
    return ChatTokenizer(tokenizer, ChatTemplate(template, {}, Path("folder")), list(tools), eos)


def turns_of(chat, *rounds):
    """Make a turn of each text and its replies; each turn ends with a stop token."""
    stop = list(chat.stop_token_ids[:1])
    return [AssistantTurn(chat._encoder.encode(text) + stop, text, replies) for text, *replies in rounds]


def assert_context_is_whole(chat, messages, turns):
    """Compare what the engine gets after each turn with the template's rendering of the whole conversation."""
    renderer = ConversationRenderer(chat.renderer.template, chat.renderer.tools)  # has learned nothing
    renderer.set_end_of_turn(chat.renderer.end_of_turn)
    known = KnownParts()
    for count in range(1, len(turns) + 1):
        ids, _ = chat.conversation_ids(messages, turns[:count], known)
        assert chat._decode_all(ids) == renderer.render_whole(messages, turns[:count])


LLAMA_2 = (
    "{%- for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' <|im_end|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [LLAMA_2, TEMPLATE.replace("<|im_end|>\\n' }}", "\\n<|im_end|>\\n' }}")])
def test_a_turn_has_one_end_where_the_template_writes_blanks_before_it(template):
    chat = chat_with(template)
    assert chat.check_history(with_tools=False, with_user_replies=True).rewrites_history
    assert_context_is_whole(chat, [ASK], turns_of(chat, ("3.", user("Sure?")), ("Yes.", user("?")), ("", user("!"))))


NAMED_BY_CALL = """\
{%- set last = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|im_start|>functions.' + last.name + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.tool_calls %}
{%- set last.name = m.tool_calls[-1].function.name %}
{{- '<|im_start|>assistant\\n' + m.tool_calls | map(attribute='function.name') | join(',') + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_result_that_the_template_names_by_its_call_has_that_name(rewrites):
    chat = chat_with(NAMED_BY_CALL)
    assert not chat.check_history().rewrites_history
    turns = turns_of(chat, ("a", tool("3")), ("b", tool("4"), tool("5", 2, "sub")))
    if rewrites:
        text = chat._decode_all(chat.conversation_ids([ASK], turns, KnownParts())[0])
    else:
        text = "".join(chat._decode_all(chat.continuation_ids(turn.replies, True)) for turn in turns)
    assert text.count("<|im_start|>functions.add\n3<|im_end|>") == 1
    assert text.endswith("<|im_start|>functions.sub\n5<|im_end|>\n<|im_start|>assistant\n")
