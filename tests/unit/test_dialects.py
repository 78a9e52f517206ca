"""Three dialects of programs become one request, and one answer becomes three that the vendors' clients read."""

import json

import anthropic.types.beta.message_create_params as beta
import anthropic.types.message_create_params as anthropic_messages
import openai.types.chat.completion_create_params as chat
import openai.types.responses.response_create_params as responses
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.agent_requests import names, recorded
from workers.rollout.agent_endpoint.dialects import DIALECTS
from workers.rollout.agent_endpoint.fields import FIELDS, FieldUse
from workers.rollout.agent_endpoint.messages import turn_message
from workers.rollout.agent_endpoint.neutral import REASONING, ModelReply, RequestRefusedError
from workers.rollout.tool_formats.parsing import ParsedTurn, ToolCall

BY_PATH = {"/v1/chat/completions": DIALECTS[0], "/v1/responses": DIALECTS[1], "/v1/messages": DIALECTS[2]}
CHAT, RESPONSES, MESSAGES = DIALECTS
USER = {"role": "user", "content": "a"}


def parsed(request):
    path = request.path.removesuffix("/count_tokens")
    return BY_PATH[path].parse(request.body, request.headers)


def refusal(dialect, body):
    with pytest.raises(RequestRefusedError) as refused:
        dialect.parse(body, {})
    return refused.value


@pytest.mark.parametrize("name", names())
def test_every_recorded_request_is_read_or_refused_by_its_field(name):
    for number, request in enumerate(recorded(name)):
        wants_json = request.body.get("output_config", {}).get("format") or request.body.get("response_format")
        if wants_json:
            with pytest.raises(RequestRefusedError, match="output_config: constrained tokens"):
                parsed(request)
            continue
        found = parsed(request)
        of_the_vendor = [tool["type"] for tool in request.body.get("tools") or () if tool.get("type") == "web_search"]
        assert list(found.unused) == of_the_vendor, f"{name} {number}"
        roles = [message["role"] for message in found.messages]
        assert {*roles} <= {"system", "user", "assistant", "tool"}
        calls = [call["id"] for message in found.messages for call in message.get("tool_calls", ())]
        results = [message.get("tool_call_id") for message in found.messages if message["role"] == "tool"]
        assert [result for result in results if result not in calls] == []
        text = json.dumps(found.messages)
        assert "x-anthropic-billing-header" not in text
        assert "cache_control" not in text


@pytest.mark.parametrize("name", [name for name in names() if name.endswith("-turns")])
def test_a_program_that_sends_its_history_back_continues_it(name):
    first, *rest = [found for request in recorded(name) if (found := parsed(request)).tools]
    for found in rest:
        assert found.messages[: len(first.messages)] == first.messages
        assert found.messages[len(first.messages)]["role"] == "assistant"
        assert found.tools == first.tools
        first = found


def test_reasoning_comes_back_apart_and_calls_in_one_turn():
    for name, tool in (("claude-code-thinking", "Bash"), ("codex-reasoning", "exec_command")):
        (request,) = recorded(name)
        turn, *results = parsed(request).messages[-3:]
        assert turn[REASONING] == "Sub-thought one."
        assert turn["content"] == "I look."
        assert [call["function"]["name"] for call in turn["tool_calls"]] == [tool] * 2
        assert [result["tool_call_id"] for result in results] == [call["id"] for call in turn["tool_calls"]]


def test_the_tools_of_a_namespace_have_one_name_for_the_model_and_two_for_the_program():
    request, *_ = recorded("codex-sub-agents")
    found = parsed(request)
    shown = [tool["function"]["name"] for tool in found.tools]
    assert "multi_agent_v1__spawn_agent" in shown
    assert found.namespaces["multi_agent_v1__spawn_agent"] == ("multi_agent_v1", "spawn_agent")
    turn = ParsedTurn("", [ToolCall("multi_agent_v1__spawn_agent", {"message": "go"}, "")])
    (item,) = RESPONSES.body(reply_of(turn, []), found)["output"]
    assert (item["namespace"], item["name"]) == ("multi_agent_v1", "spawn_agent")
    again = RESPONSES.parse({"input": [USER, item, USER]}, {})
    assert again.messages[1]["tool_calls"][0]["function"]["name"] == "multi_agent_v1__spawn_agent"


def test_system_messages_stay_where_the_program_put_them():
    _, request = recorded("claude-code-turns")
    assert [message["role"] for message in parsed(request).messages] == [
        "system",
        "user",
        "system",
        "assistant",
        "tool",
    ]


def reply_of(turn, before, reasoning=""):
    message = turn_message(turn, before)
    finish = "calls" if turn.calls else "stop"
    return ModelReply(id="0a1b", message=message, text=turn.content, reasoning=reasoning, finish=finish)


def sent_back(dialect, reply, request):
    """The body of the next request: the conversation with the answer, as the vendor's programs append it."""
    body = dialect.body(reply, request)
    if dialect is CHAT:
        return {"messages": [USER, body["choices"][0]["message"], USER]}
    if dialect is RESPONSES:
        return {"input": [USER, *body["output"], USER]}
    return {"messages": [USER, {"role": "assistant", "content": body["content"]}, USER]}


plain = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, st.text("ab_", min_size=1), st.dictionaries(plain, values, max_size=3), st.just(""))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@given(text=plain, found=st.lists(calls, max_size=3), reasoning=plain)
def test_an_answer_that_comes_back_is_the_turn_that_was_recorded(dialect, text, found, reasoning):
    asked = dialect.parse(first_request(dialect), {})
    reasoning = "" if dialect is CHAT else reasoning
    reply = reply_of(ParsedTurn(text, found), asked.messages, reasoning)
    message = dialect.parse(sent_back(dialect, reply, asked), {}).messages[1]
    assert message.pop(REASONING, "") == reasoning
    assert message == reply.message


def first_request(dialect):
    return {"input": [USER]} if dialect is RESPONSES else {"messages": [USER]}


PARAMETERS = {
    "chat": (chat.CompletionCreateParamsBase, chat.CompletionCreateParamsStreaming),
    "responses": (responses.ResponseCreateParamsBase, responses.ResponseCreateParamsStreaming),
    "messages": (
        *(anthropic_messages.MessageCreateParamsBase, anthropic_messages.MessageCreateParamsStreaming),
        *(beta.MessageCreateParamsBase, beta.MessageCreateParamsStreaming),
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_field_of_the_vendors_clients_has_a_rule_with_a_reason(name):
    known = set().union(*(kind.__annotations__ for kind in PARAMETERS[name]))
    assert known - set(FIELDS[name]) == set(), "these fields need a rule in agent_endpoint/fields.py"
    assert [field for field, rule in FIELDS[name].items() if not rule.why] == []


@pytest.mark.parametrize(
    ("dialect", "more", "field"),
    [
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"stop": [1]}, "stop"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text"),
        (RESPONSES, {"tools": [{"type": "custom", "name": "x"}]}, "tools"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "{"}]}, "messages"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
    ],
)
def test_what_cannot_be_had_is_refused_by_the_name_of_its_field(dialect, more, field):
    error = refusal(dialect, first_request(dialect) | more)
    assert error.field == field
    assert str(error).startswith(field)


def test_what_changes_nothing_is_accepted():
    assert CHAT.parse({"messages": [USER], "n": 1, "logit_bias": {}, "tool_choice": "auto"}, {}).unused == ()
    assert RESPONSES.parse({"input": "a", "text": {"format": {"type": "text"}}, "background": False}, {}).unused == ()
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert MESSAGES.parse({"messages": [USER], "context_management": kept}, {}).unused == ()


def test_tools_that_the_vendor_runs_are_left_out_and_named():
    web = {"type": "web_search_20250305", "name": "web_search"}
    own = {"name": "run", "input_schema": {"type": "object"}}
    found = MESSAGES.parse({"messages": [USER], "tools": [web, own]}, {})
    assert [tool["function"]["name"] for tool in found.tools] == ["run"]
    assert found.unused == ("web_search_20250305",)


def test_a_field_that_nobody_knows_is_named():
    assert CHAT.parse({"messages": [USER], "brand_new": 1}, {}).unused == ("brand_new",)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("value", [None, 1, "x", [1], [[]], [{}], {"role": "user"}, [{"role": 3}], [{"type": []}]])
def test_a_malformed_conversation_is_refused(dialect, value):
    if dialect is RESPONSES and value == "x":
        return
    field = "input" if dialect is RESPONSES else "messages"
    assert refusal(dialect, {field: value}).field == field


def test_the_rules_of_a_field_are_of_three_kinds():
    uses = {rule.use for rules in FIELDS.values() for rule in rules.values()}
    assert uses == {*FieldUse}
