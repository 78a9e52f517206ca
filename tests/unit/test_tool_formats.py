"""All formats except Hermes (`test_tool_format.py`), and properties that all formats share."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.rollout.tool_formats import TOOL_FORMATS
from workers.rollout.tool_formats.parsing import MAX_ERRORS, ParsedTurn, ToolCall

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'


def token(words):
    """Make a special token of DeepSeek."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


BEGIN, SEP, END = token("tool call begin"), token("tool sep"), token("tool call end")
R1 = f'{BEGIN}function{SEP}add\n```json\n{{"a": 1, "b": 2}}\n```{END}'
V31 = f'{BEGIN}add{SEP}{{"a": 1, "b": 2}}{END}'
CALLS = {
    "deepseek": token("tool calls begin") + R1 + token("tool calls end"),
    "hermes": f"<tool_call>\n{ADD}\n</tool_call>",
    "llama3_json": LLAMA,
    "mistral": f"[TOOL_CALLS][{ADD}]",
    "pythonic": "[add(a=1, b=2)]",
}


def read(name, text, **options):
    turn = TOOL_FORMATS[name].parse(text, **options)
    return [(call.name, call.arguments) for call in turn.calls]


ONE = [("add", {"a": 1, "b": 2})]
LOOK = ("look", {})


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("llama3_json", LLAMA, ONE, ""),
        ("llama3_json", f"  {LLAMA}\n", ONE, ""),
        ("llama3_json", ADD, ONE, ""),
        ("llama3_json", f"<|python_tag|>{LLAMA}", ONE, ""),
        ("llama3_json", f'<|python_tag|>{LLAMA}<|python_tag|>{{"name": "look"}}', [*ONE, LOOK], ""),
        ("llama3_json", f'{LLAMA}; {{"name": "look", "parameters": {{}}}}', [*ONE, LOOK], ""),
        ("llama3_json", f'{LLAMA}\n{{"name": "look", "parameters": {{}}}}', [*ONE, LOOK], ""),
        ("llama3_json", f'[{LLAMA}, {{"name": "look", "parameters": {{}}}}]', [*ONE, LOOK], ""),
        ("llama3_json", f'{{"type": "function", {LLAMA[1:]}', ONE, ""),
        ("llama3_json", f"Let me add.\n{LLAMA}", ONE, "Let me add."),
        ("llama3_json", f"{LLAMA} That is it.", ONE, "That is it."),
        ("mistral", f"[TOOL_CALLS] [{ADD}]", ONE, ""),
        ("mistral", f'[TOOL_CALLS][{ADD}, {{"name": "look"}}]', [*ONE, LOOK], ""),
        ("mistral", f"[TOOL_CALLS]{ADD}", ONE, ""),
        ("mistral", f"I add.[TOOL_CALLS][{ADD}] So.", ONE, "I add. So."),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', ONE, ""),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1, "b": 2}', ONE, ""),
        ("mistral", '[TOOL_CALLS]add{"a": 1, "b": 2}', ONE, ""),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]look[ARGS]{}', [*ONE, LOOK], ""),
        (
            "mistral",
            '[TOOL_CALLS]say[ARGS]{"it": "[TOOL_CALLS]look[ARGS]{}"}',
            [("say", {"it": "[TOOL_CALLS]look[ARGS]{}"})],
            "",
        ),
        ("deepseek", CALLS["deepseek"], ONE, ""),
        ("deepseek", V31, ONE, ""),
        ("deepseek", f"So. {R1}\n{BEGIN}look{SEP}{{}}{END} And?", [*ONE, LOOK], "So. \n And?"),
        ("pythonic", "[add(a=1, b=2), look()]", [*ONE, LOOK], ""),
        ("pythonic", " [ add( a = 1 , b = 2 ) ] ", ONE, ""),
        ("pythonic", "<|python_start|>[add(a=1, b=2)]<|python_end|>", ONE, ""),
        ("pythonic", "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>So.", ONE, "So."),
        ("pythonic", "<|tool_call_start|>add(a=1, b=2)<|tool_call_end|>", ONE, ""),
        ("pythonic", "I add.\n[add(a=1, b=2)]\nSo.", ONE, "I add.\n\nSo."),
        ("pythonic", "[my.tools.add(a=1)]", [("my.tools.add", {"a": 1})], ""),
        (
            "pythonic",
            """[say(it='a "b" ]', n=-1, x=1.5, on=True, off=false, none=null, l=[1, (2,)], d={"k": {"m": None}})]""",
            [
                (
                    "say",
                    {
                        "it": 'a "b" ]',
                        "n": -1,
                        "x": 1.5,
                        "on": True,
                        "off": False,
                        "none": None,
                        "l": [1, [2]],
                        "d": {"k": {"m": None}},
                    },
                )
            ],
            "",
        ),
    ],
)
def test_a_call_is_parsed_and_removed_from_the_content(name, text, calls, content):
    turn = TOOL_FORMATS[name].parse(text)
    assert [(call.name, call.arguments) for call in turn.calls] == calls
    assert (turn.content, turn.errors) == (content, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"answer": 3}'),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", "Write {this} or [that]."),
        ("llama3_json", f"The call `{LLAMA}` adds."),
        ("mistral", "[TOOL_RESULTS] add(1)"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "The list [add(a=1)] is a call."),
        ("pythonic", "[see above]"),
    ],
)
def test_an_answer_is_not_a_call(name, text):
    assert TOOL_FORMATS[name].parse(text) == ParsedTurn(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("llama3_json", '{"name": "add", "parameters": {', "JSON is malformed"),
        ("llama3_json", "<|python_tag|>add.call(1)", "JSON is malformed"),
        ("llama3_json", '{"name": "add", "parameters": [1]}', "not an array"),
        ("llama3_json", '{"parameters": {}}', "no 'name'"),
        ("llama3_json", '{"name": "add", "parameters": {"a": NaN}}', "NaN is not valid JSON"),
        ("mistral", "[TOOL_CALLS]", "no name or JSON"),
        ("mistral", "[TOOL_CALLS]add(1)", "no name or JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{'a': 1}", "JSON is malformed"),
        ("mistral", "[TOOL_CALLS][1]", "a JSON object, not a number"),
        ("mistral", "[TOOL_CALLS][]", "empty"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "\\ud800"}', "surrogate"),
        ("deepseek", f"{BEGIN}add", "is missing"),
        ("deepseek", f"{BEGIN}function{SEP}", "no name"),
        ("deepseek", f"{BEGIN}function{SEP}add\n```json\n[1", "JSON is malformed"),
        ("deepseek", f"{BEGIN}add{SEP}[1]{END}", "JSON is malformed"),
        ("deepseek", R1.removesuffix(END), "is missing"),
        ("deepseek", f'{BEGIN}add{SEP}{{"a": "\\ud800"}}{END}', "surrogate"),
        ("pythonic", "[add(1, 2)]", "give arguments by name"),
        ("pythonic", "[add(**{'a': 1})]", "each argument once"),
        ("pythonic", "[add(a=b)]", "only plain values"),
        ("pythonic", "[add(a=__import__('os').system('true'))]", "only plain values"),
        ("pythonic", "[add(a=f'{1}')]", "only plain values"),
        ("pythonic", "[add(a=1e999)]", "only plain values"),
        ("pythonic", "[add(a=b'x')]", "only plain values"),
        ("pythonic", "[add(a={1: 2})]", "keys must be strings"),
        ("pythonic", "[add(a=1", "not a list of Python calls"),
        ("pythonic", "[add(a=1) + 3]", "not a call"),
        ("pythonic", "[add()()]", "not a call"),
        ("pythonic", "<|tool_call_start|><|tool_call_end|>", "not a list of Python calls"),
        ("pythonic", "[add(a='\\ud800')]", "surrogate"),
        ("pythonic", "[add(a=" + "9" * 5000 + ")]", "not a list of Python calls"),
        ("pythonic", "[add(a=" + "[" * 2000 + "]" * 2000 + ")]", "nested too deeply"),
        ("pythonic", "[add(a=" + "-" * 20000 + "1)]", ""),
        ("pythonic", "[add(a=" + "1+" * 20000 + "1)]", ""),
        ("pythonic", "[add(a=" + "a." * 20000 + "b)]", ""),
    ],
)
def test_a_malformed_call_is_an_error_for_the_model(name, text, message):
    turn = TOOL_FORMATS[name].parse(text)
    assert not turn.calls
    assert turn.content == text
    (error,) = turn.errors
    assert error.startswith("Error: this tool call could not be read")
    assert message in error
    assert len(error) <= 300


def test_a_malformed_call_does_not_affect_others():
    assert read("mistral", '[TOOL_CALLS]oops[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}') == ONE
    assert read("mistral", f"[TOOL_CALLS][1, {ADD}]") == ONE
    assert read("deepseek", f"{BEGIN}oops{R1}") == ONE
    assert read("llama3_json", f'{{"parameters": {{}}}}; {LLAMA}') == ONE
    assert read("pythonic", "[look(1), add(a=1, b=2)]") == ONE


LONG = {
    "a name and blanks": ("mistral", "[TOOL_CALLS]a" + " " * 2_000_000),
    "an id and blanks": ("mistral", "[TOOL_CALLS]a[CALL_ID]b" + " " * 2_000_000),
    "openings": ("mistral", "[TOOL_CALLS]" * 100_000),
    "malformed elements": ("mistral", f"[TOOL_CALLS][{'1,' * 100_000}1]"),
    "malformed calls": ("hermes", "<tool_call>oops</tool_call>" * 100_000),
    "strings without an end": ("hermes", '<tool_call>{"a' * 100_000),
    "names without an end": ("deepseek", (BEGIN + SEP) * 100_000),
    "line breaks": ("llama3_json", "\n" * 2_000_000),
    "a bracket and line breaks": ("llama3_json", "[" + "\n" * 2_000_000),
    "indented blank lines": ("llama3_json", (" " * 20 + "\n") * 100_000),
    "braces and line breaks": ("llama3_json", "{\n" * 1_000_000),
    "lists of calls": ("pythonic", "<|tool_call_start|>[1]<|tool_call_end|>" * 50_000),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("name", "text"), LONG.values(), ids=LONG)
def test_a_very_long_malformed_turn_is_read_in_linear_time(name, text):
    """Each takes less than 2 s; with a time that grows as the square of the length, minutes to days."""
    turn = TOOL_FORMATS[name].parse(text)
    assert not turn.calls
    assert len(turn.errors) <= MAX_ERRORS + 1
    assert turn.content == text


def test_a_call_keeps_the_models_id_if_it_is_valid():
    def named(text):
        return [call.id for call in TOOL_FORMATS["mistral"].parse(text).calls]

    assert named('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc123def"}]') == ["abc123def"]
    assert named("[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]f[CALL_ID]short[ARGS]{}") == ["abc123def", None]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("opening", "closing"), [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_calls_inside_reasoning_are_not_executed(name, opening, closing):
    call = CALLS[name]
    thought = f"{opening}\nOr:\n{call}\n"
    for text, thinking in [(thought, False), (thought.removeprefix(opening), True)]:
        assert read(name, f"{text}{closing}\n{call}", starts_in_reasoning=thinking) == ONE
        assert read(name, text, starts_in_reasoning=thinking) == [], "an unclosed block"
        turn = TOOL_FORMATS[name].parse(f"{text}{closing}\n{call}", starts_in_reasoning=thinking)
        assert turn.content == f"{text}{closing}".strip()
    begun_unseen = thought.removeprefix(opening) + closing
    assert read(name, f"{begun_unseen}\n{call}") == ONE
    assert read(name, call, starts_in_reasoning=False) == ONE


def pieces():
    tags = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<|tool_call_start|>",
    ]
    tags += [
        "<|tool_call_end|>",
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "add(",
        "a=",
        "lambda:",
        "f'",
        "**",
        "\0",
    ]
    tags += [
        BEGIN,
        SEP,
        END,
        "```json\n",
        "\\",
        "\\N{",
        "\\ud800",
        "0x",
        "1_",
        "...",
        "# ",
        "\n",
        ";",
        '"name"',
        '"arguments": ',
        "NaN",
        "1e999",
    ]
    return st.lists(
        st.one_of(
            st.sampled_from([*tags, *CALLS.values()]),
            st.text(string.punctuation + " \n\tab01é😀", max_size=6),
            st.text(max_size=4),
        ),
        max_size=14,
    ).map("".join)


@given(pieces(), st.booleans())
def test_parsing_never_raises_and_its_result_can_be_stored(text, thinking):
    for form in TOOL_FORMATS.values():
        turn = form.parse(text, starts_in_reasoning=thinking)
        assert all(isinstance(call, ToolCall) and isinstance(call.name, str) and call.name for call in turn.calls)
        assert all(0 < len(error) <= 300 for error in turn.errors)
        for call in turn.calls:
            json.dumps(call.arguments, allow_nan=False).encode()
            assert call.id is None or len(call.id) == 9
        if not turn.calls:
            assert turn.content == text


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)
arguments = st.dictionaries(st.from_regex(r"[a-z]{1,8}_", fullmatch=True), json_values, max_size=3)


@given(st.lists(arguments, min_size=1, max_size=3))
def test_each_format_parses_back_what_it_writes(calls):
    written = {
        "hermes": "".join(f"<tool_call>{json.dumps({'name': 'f', 'arguments': a})}</tool_call>" for a in calls),
        "llama3_json": "; ".join(json.dumps({"name": "f", "parameters": a}) for a in calls),
        "deepseek": "".join(f"{BEGIN}f{SEP}{json.dumps(a)}{END}" for a in calls),
        "mistral": "".join(f"[TOOL_CALLS]f[ARGS]{json.dumps(a)}" for a in calls),
        "pythonic": f"[{', '.join('f(' + ', '.join(f'{k}={v!r}' for k, v in a.items()) + ')' for a in calls)}]",
    }
    for name, text in written.items():
        if "</think>" not in text and "[/THINK]" not in text:
            assert read(name, text) == [("f", a) for a in calls], name
    listed = "[TOOL_CALLS]" + json.dumps([{"name": "f", "arguments": a} for a in calls])
    assert read("mistral", listed) == [("f", a) for a in calls]
