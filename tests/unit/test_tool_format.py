import json

import pytest

from workers.rollout.tool_formats import TOOL_FORMATS
from workers.rollout.tool_formats.parsing import MAX_ERRORS, ToolCall

parse = TOOL_FORMATS["hermes"].parse


def call(body):
    return f"<tool_call>{body}</tool_call>"


ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def test_text_without_calls_is_content_alone():
    turn = parse("  Answer: 3\n")
    assert (turn.content, turn.calls, turn.errors) == ("  Answer: 3\n", [], [])


def test_a_call_is_parsed_and_removed_from_the_content():
    turn = parse(f"Let me see.\n<tool_call>\n{ADD}\n</tool_call>")
    assert turn.calls == [ToolCall("add", {"a": 1, "b": 2}, ADD)]
    assert (turn.content, turn.errors) == ("Let me see.", [])


def test_several_calls_in_one_turn_keep_their_order():
    turn = parse(call(ADD) + "and" + call('{"name": "mul", "arguments": {}}'))
    assert [(result.name, result.arguments) for result in turn.calls] == [("add", {"a": 1, "b": 2}), ("mul", {})]
    assert turn.content == "and"


def test_arguments_may_be_a_string_of_json():
    assert parse(call('{"name": "add", "arguments": "{\\"a\\": 1}"}')).calls[0].arguments == {"a": 1}


def test_a_call_without_arguments_may_leave_them_out():
    assert parse(call('{"name": "look"}')).calls[0].arguments == {}


def test_arguments_may_contain_the_tags():
    body = json.dumps({"name": "run", "arguments": {"code": "print('</tool_call><tool_call>')"}})
    turn = parse(call(body) + call(ADD))
    assert [result.name for result in turn.calls] == ["run", "add"]
    assert turn.calls[0].arguments == {"code": "print('</tool_call><tool_call>')"}
    assert not turn.errors


def test_integers_of_any_size_survive():
    assert parse(call('{"name": "add", "arguments": {"a": ' + "9" * 30 + "}}")).calls[0].arguments == {
        "a": int("9" * 30)
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "JSON is malformed"),
        ("add(1, 2)", "JSON is malformed"),
        ("{'name': 'add'}", "JSON is malformed"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not valid JSON"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "JSON is malformed"),
        ("[" * 100_000, "JSON is malformed"),
        ('["add"]', "a JSON object, not an array"),
        ("null", "a JSON object, not null"),
        ('{"arguments": {}}', "no 'name'"),
        ('{"name": "", "arguments": {}}', "no 'name'"),
        ('{"name": 5, "arguments": {}}', "no 'name'"),
        ('{"name": "add", "arguments": [1, 2]}', "not an array"),
        ('{"name": "add", "arguments": null}', "not null"),
        ('{"name": "add", "arguments": "1, 2"}', "a string that is not JSON"),
        ('{"name": "add", "arguments": "[1]"}', "not an array"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "add", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}', "surrogate"),
        (ADD + " thanks", "its JSON is followed by 'thanks"),
    ],
)
def test_a_malformed_call_is_an_error_for_the_model_and_does_not_affect_others(body, message):
    turn = parse(call(body) + call(ADD))
    assert [result.name for result in turn.calls] == ["add"]
    assert len(turn.errors) == 1
    assert message in turn.errors[0]
    assert len(turn.errors[0]) <= 300


@pytest.mark.parametrize("text", ["<tool_call>" + ADD, "<tool_call>" + ADD[:-5], "<tool_call>"])
def test_a_call_that_is_not_closed_is_an_error(text):
    turn = parse("So: " + text)
    assert turn.content == "So: " + text
    assert not turn.calls
    assert len(turn.errors) == 1
    assert "</tool_call> is missing" in turn.errors[0]


def test_a_call_that_is_not_closed_does_not_swallow_the_next_one():
    turn = parse("<tool_call>" + ADD + call('{"name": "mul", "arguments": {}}'))
    assert [result.name for result in turn.calls] == ["mul"]
    assert len(turn.errors) == 1


def test_a_malformed_call_stays_in_the_content():
    assert parse("a" + call("oops") + "b" + call(ADD) + "c").content == "a" + call("oops") + "bc"


def test_calls_inside_reasoning_are_not_executed():
    turn = parse(f"<think>I could write {call(ADD)}.</think>\n{call(ADD)}")
    assert len(turn.calls) == 1
    assert turn.content == f"<think>I could write {call(ADD)}.</think>"


def test_a_text_of_opening_tags_is_parsed_quickly():
    text = "<tool_call> [1, 2" * 4_000
    errors = parse(text).errors  # minutes, and so a timeout, if each tag parsed all text after it
    assert len(errors) == MAX_ERRORS + 1
    assert "more than 64 calls are malformed" in errors[-1]
