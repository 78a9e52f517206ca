"""What the engine gets is what the template writes for the whole conversation, wherever that template looks."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tests.cases.chats import ADD, TEMPLATE, make_tokenizer
from tests.cases.families import chat_of, spelled
from tests.unit.test_families import SYSTEM, THOUGHTS, TOOLS
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.renderer import AssistantTurn
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
    for count in range(1, len(turns) + 1):
        ids, _ = chat.conversation_ids(messages, turns[:count])
        assert chat._decode_all(ids) == chat.renderer.render_whole(messages, turns[:count])


REWRITING = {"qwq": {}, "deepseek-r1": {}, "qwen3": {"enable_thinking": False}, "mistral-nemo": {}}
"""Families whose templates rewrite history that has tool results, with arguments of the template."""
CONTENTS = st.text(max_size=20) | st.sampled_from(["<tool_response>", "</think>", "user", "3", "\n 7 \n", '{"a": 1}'])


@pytest.fixture(scope="module")
def chats():
    """Chat tokenizers of every rewriting family."""
    return {name: chat_of(name, TOOLS, **arguments) for name, arguments in REWRITING.items()}


@st.composite
def episodes(draw):
    """Draw a family, whether there is a system message, and turns that are answered by tools and perhaps by a user."""
    name = draw(st.sampled_from(sorted(REWRITING)))
    thought, opening = THOUGHTS.get(name, ""), "<think>\n" if name in ("qwq", "deepseek-r1") else ""
    turns = []
    for number in range(draw(st.integers(1, 8))):
        start = thought.format(draw(CONTENTS)) if draw(st.booleans()) else ""
        replies = [tool(text, i) for i, text in enumerate(draw(st.lists(CONTENTS, min_size=1, max_size=2)))]
        if draw(st.integers(0, 5)) == 0:
            replies = [user(draw(CONTENTS))]
        turns.append((f"{start}Step {number}: add.", replies, opening if start and number % 3 else ""))
    return name, draw(st.booleans()), turns


@given(episodes())
def test_a_rewritten_conversation_is_what_the_template_writes_with_the_tokens_that_were_sampled(chats, episode):
    name, has_system, drawn = episode
    chat = chats[name]
    messages = [SYSTEM, ASK] if has_system else [ASK]
    turns = []
    for text, replies, opening in drawn:
        ids = [*spelled(chat._tokenizer, text), chat.end_of_turn_id]
        turns.append(AssistantTurn(ids, chat.decode(ids), replies, opening))
    assert_context_is_whole(chat, messages, turns)
    context = chat.conversation_ids(messages, turns)[0].tolist()
    shown = chat.renderer.render_whole(messages, turns)
    for number in range(len(turns)):
        answer = spelled(chat._tokenizer, f"Step {number}: add.")
        is_sampled = any(context[at : at + len(answer)] == answer for at in range(len(context)))
        assert is_sampled or f"Step {number}: add." not in shown


GENERATION = "{{- '<|im_start|>assistant\\n' }}"
BY_SYSTEM_MESSAGE = TEMPLATE.replace(
    GENERATION, "{{- '<|im_start|>assistant\\n' + ('(short)' if '/no_think' in messages[0].content else '') }}"
)
SYSTEM_FIRST = (
    "{%- for m in messages if m.role == 'system' %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    "{%- for m in messages if m.role != 'system' %}{{ m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant\\n' }}{%- endif %}"
)
LATE = TEMPLATE.replace(GENERATION, "{{- '<|im_start|>assistant\\n' + ('!' if messages|length > 7 * 20 else '') }}")


@pytest.mark.parametrize(
    ("template", "prompt", "replies", "first"),
    [
        (BY_SYSTEM_MESSAGE, [ASK], [tool("3")] * 9, None),
        (BY_SYSTEM_MESSAGE, [{"role": "system", "content": "Be brief. /no_think"}, ASK], [tool("3")] * 9, 1),
        (SYSTEM_FIRST, [ASK], [tool("3"), {"role": "system", "content": "Hurry."}], 2),
        (LATE, [ASK], [tool("3")] * 128, 128),
    ],
)
async def test_a_conversation_that_the_template_treats_unlike_the_samples_is_rendered_as_a_whole(
    template, prompt, replies, first
):
    chat = chat_with(template)
    assert not chat.check_history().rewrites_history
    turns = turns_of(chat, *((f"Step {number}.", reply) for number, reply in enumerate(replies)))
    found = [count for count in range(1, len(turns) + 1) if not await chat.continues(prompt, turns[:count])]
    assert found[:1] == ([] if first is None else [first])


@pytest.mark.parametrize(
    "shown", ["messages|length - loop.index < 40", "messages|length - loop.index < 2 * 6", "loop.revindex0 < 30"]
)
def test_a_template_that_shortens_early_results_rewrites_history(shown):
    chat = chat_with(
        TEMPLATE.replace("+ message.content + '\\n</", f"+ (message.content if {shown} else '-') + '\\n</")
    )
    assert chat.check_history().rewrites_history
    assert_context_is_whole(chat, [ASK], turns_of(chat, *((f"Step {i}.", tool(str(i))) for i in range(25))))


def test_a_template_that_looks_for_a_word_in_any_user_message_rewrites_history():
    opening = GENERATION.replace("\\n'", "\\n' + ('(short)' if ns.short else '')")
    word = "{%- if message.role == 'user' and '/no_think' in message.content %}{%- set ns.short = true %}{% endif %}"
    template = TEMPLATE.replace(GENERATION, opening).replace(
        "{%- for message in messages %}", "{%- for message in messages %}" + word
    )
    chat = chat_with("{%- set ns = namespace(short=false) %}" + template, ())
    assert chat.check_history(with_tools=False, with_user_replies=True).rewrites_history


LLAMA_2 = (
    "{%- for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' <|im_end|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [LLAMA_2, TEMPLATE.replace("<|im_end|>\\n' }}", "\\n<|im_end|>\\n' }}")])
def test_a_turn_has_one_end_where_the_template_writes_blanks_before_it(template):
    chat = chat_with(template)
    assert chat.check_history(with_tools=False, with_user_replies=True).rewrites_history
    assert_context_is_whole(chat, [ASK], turns_of(chat, ("3.", user("Sure?")), ("Yes.", user("?")), ("", user("!"))))


def llama_2_tokenizer():
    """Make a tokenizer that writes a blank before each part between special tokens."""
    pieces = ["<unk>", *map(chr, range(33, 127)), "▁", "▁▁"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "▁")], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return tokenizer


def test_blanks_after_a_turn_are_the_tokens_of_the_whole_text():
    tokenizer = llama_2_tokenizer()
    end = tokenizer.token_to_id("<|im_end|>")
    chat = ChatTokenizer(tokenizer, ChatTemplate(LLAMA_2, {}, Path("folder")), None, {end})
    sampled = [tokenizer.token_to_id("3"), end]
    ids, _ = chat.conversation_ids([ASK], [AssistantTurn(sampled, "3", [user("Sure?")])])
    whole = tokenizer.encode("[INST] What is 1 + 2? [/INST] 3 <|im_end|>[INST] Sure? [/INST]").ids
    tail = whole[whole.index(sampled[0]) :]
    assert ids.tolist()[-len(tail) :] == tail


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
        text = chat._decode_all(chat.conversation_ids([ASK], turns)[0])
    else:
        text = "".join(chat._decode_all(chat.continuation_ids(turn.replies, True)) for turn in turns)
    assert text.count("<|im_start|>functions.add\n3<|im_end|>") == 1
    assert text.endswith("<|im_start|>functions.sub\n5<|im_end|>\n<|im_start|>assistant\n")


def test_a_result_that_changes_the_start_of_a_conversation_changes_it_in_the_context():
    seen = "{%- for m in messages if '!!' in m.content %}{{- '(an error)' if loop.first }}{% endfor %}"
    last_result = "+ (message.content if loop.revindex < 3 else '-') + '\\n</"
    chat = chat_with(seen + TEMPLATE.replace("+ message.content + '\\n</", last_result))
    assert chat.check_history().rewrites_history
    contents = ["3", "4", "5", "6", "7", "!!", "8"]
    assert_context_is_whole(chat, [ASK], turns_of(chat, *((f"Step {c}.", tool(c)) for c in contents)))


def test_a_user_message_after_a_result_is_no_call():
    chat = chat_with(NAMED_BY_CALL)
    assert "functions.add\n3<|im_end|>" in chat.renderer.render_continuation([tool("3"), user("Go on.")])
