"""Which engine answers count as samples."""

import msgspec
import pytest

from stream.errors import EngineError, EngineRefusedError
from stream.records import Failure, Span
from stream.validity import RolloutReason, TruncationReason
from workers.engine_api.wire import WeightInfo, policy_version
from workers.rollout.engine_client.sampling import SamplingOptions, end_after_error
from workers.rollout.engine_client.sampling_apis import CompletionsApi, GenerateApi, SamplingRequest

URL = "http://engine"
CONTENT = [{"token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs": []}, {"token_id": 2, "logprob": -1.5}]


def generated(**changes) -> bytes:
    """Return a token answer of vLLM 0.32."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [7, 2],
        "routed_experts": None,
        "weight_versions": [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}],
        "logprobs": {"content": CONTENT},
    }
    return msgspec.json.encode({"request_id": "r", "model": "m", "usage": None, "choices": [choice | changes]})


def completed(**changes) -> bytes:
    """Return a completion answer of vLLM 0.32."""
    logprobs = {"text_offset": [0, 1], "token_logprobs": [-0.5, -1.5], "tokens": ["token_id:7", "token_id:2"]}
    choice = {
        "index": 0,
        "text": "(",
        "logprobs": logprobs | {"top_logprobs": [{"token_id:7": -0.5}, None]},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [7, 2],
        "prompt_token_ids": [5],
    }
    return msgspec.json.encode({"id": "r", "object": "text_completion", "choices": [choice | changes]})


def test_a_complete_answer_is_a_sample():
    one = GenerateApi().decode(200, generated(), URL, version=9)
    other = CompletionsApi().decode(200, completed(), URL, version=9)
    assert (one.token_ids, one.logprobs, one.finish_reason) == ([7, 2], [-0.5, -1.5], "stop")
    assert (other.token_ids, other.logprobs, other.finish_reason) == ([7, 2], [-0.5, -1.5], "stop")
    assert (one.spans, other.spans) == ([Span(4, 0, 1), Span(5, 1, 2)], [Span(9, 0, 2)])


def test_an_answer_without_versions_gets_the_given_one():
    old = generated(weight_versions=None)
    assert not GenerateApi().reports_versions(old)
    assert GenerateApi().reports_versions(generated())
    assert not CompletionsApi().reports_versions(completed())
    assert GenerateApi().decode(200, old, URL, version=3).spans == [Span(3, 0, 2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": "abort"}, "aborted the request after 2 tokens"),
        ({"finish_reason": "abort", "token_ids": [], "logprobs": None, "weight_versions": None}, "after 0 tokens"),
        ({"finish_reason": "repetition"}, "cannot be decoded"),
        ({"finish_reason": None}, "cannot be decoded"),
        ({"token_ids": []}, "0 tokens with 2 log-probs"),
        ({"token_ids": None}, "cannot be decoded"),
        ({"token_ids": [7, -1]}, "cannot be decoded"),
        ({"token_ids": [7, 2**31]}, "cannot be decoded"),
        ({"token_ids": [7, 8]}, "log-probs of other tokens"),
        ({"token_ids": [7, 2, 3]}, "3 tokens with 2 log-probs"),
        ({"logprobs": None}, "2 tokens with 0 log-probs"),
        ({"logprobs": {"content": None}}, "cannot be decoded"),
        ({"logprobs": {"content": [*CONTENT[:1], {"token_id": 2, "logprob": None}]}}, "cannot be decoded"),
        ({"logprobs": {"content": [*CONTENT[:1], {"token_id": 2, "logprob": -9999.0}]}}, "not finite"),
        ({"logprobs": {"content": [*CONTENT[:1], {"token_id": 2, "logprob": 17.5}]}}, "17.5 as a log-prob"),
        ({"weight_versions": []}, "do not cover 2 tokens"),
        ({"weight_versions": [{"version": "4", "start": 0, "end": 1}]}, "do not cover 2 tokens"),
        ({"weight_versions": [{"version": "4", "start": 0, "end": 3}]}, "do not cover 2 tokens"),
    ],
)
def test_an_invalid_answer_of_generate_is_not_a_sample(changes, message):
    with pytest.raises(EngineError, match=message) as error:
        GenerateApi().decode(200, generated(**changes), URL, version=9)
    assert not isinstance(error.value, EngineRefusedError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": "abort"}, "aborted the request after 2 tokens"),
        ({"finish_reason": "abort", "token_ids": []}, "aborted the request after 0 tokens"),
        ({"finish_reason": None}, "cannot be decoded"),
        ({"token_ids": None}, "return_token_ids"),
        ({"token_ids": [7, -1]}, "cannot be decoded"),
        ({"token_ids": [7, 2**64 - 1]}, "cannot be decoded"),
        ({"token_ids": []}, "0 tokens with 2 log-probs"),
        ({"logprobs": None}, "2 tokens with 0 log-probs"),
        ({"logprobs": {"token_logprobs": [-0.5]}}, "2 tokens with 1 log-probs"),
        ({"logprobs": {"token_logprobs": [-0.5, None]}}, "not finite"),
        ({"logprobs": {"token_logprobs": [-0.5, -9999.0]}}, "not finite"),
        ({"logprobs": {"token_logprobs": [-0.5, 17.5]}}, "17.5 as a log-prob"),
    ],
)
def test_an_invalid_answer_of_completions_is_not_a_sample(changes, message):
    with pytest.raises(EngineError, match=message) as error:
        CompletionsApi().decode(200, completed(**changes), URL, version=9)
    assert not isinstance(error.value, EngineRefusedError)


@pytest.mark.parametrize("route", [GenerateApi(), CompletionsApi()])
@pytest.mark.parametrize(
    "payload", [b"", b"null", b"[]", b'{"choices": []}', b'{"choices": {}}', b"[" * 10_000, b'{"choices": [1, 2]}']
)
def test_malformed_json_is_not_a_sample(route, payload):
    with pytest.raises(EngineError):
        route.decode(200, payload, URL, version=0)


@pytest.mark.parametrize("route", [GenerateApi(), CompletionsApi()])
def test_two_choices_are_refused(route):
    whole = msgspec.json.decode(generated() if isinstance(route, GenerateApi) else completed())
    with pytest.raises(EngineError, match="2 choices"):
        route.decode(200, msgspec.json.encode(whole | {"choices": whole["choices"] * 2}), URL, version=0)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b'{"error": {"message": "bad \\ud800"}}', "bad ?"),
        ("{ü".encode() * 1000, "{ü" * 400),
        (b'{"error": "' + b"x" * 200_000 + b'"}', '{"error": "' + "x" * 789),
        (b"[" * 10_000, "[" * 800),
    ],
    ids=["lone surrogate", "no JSON", "long", "deep"],
)
def test_a_record_can_hold_whatever_error_a_server_answers(payload, message):
    with pytest.raises(EngineRefusedError) as refused:
        GenerateApi().decode(400, payload, URL, version=0)
    failure = end_after_error(refused.value, 0)
    assert failure.detail == f"{URL} answers 400: {message}"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure) == failure


@pytest.mark.parametrize(
    "words",
    [
        "The decoder prompt (length 300) is longer than the maximum model length of 256. Make sure that ...",
        "This model's maximum context length is 256 tokens. However, your prompt contains 300 input tokens, ...",
    ],
)
def test_both_routes_messages_for_a_context_that_is_too_long_are_recognized(words):
    payload = msgspec.json.encode({"error": {"message": words, "code": 400}})
    with pytest.raises(EngineRefusedError) as refused:
        GenerateApi().decode(400, payload, URL, version=0)
    first = end_after_error(refused.value, 0)
    assert isinstance(first, Failure)
    assert first.reason is RolloutReason.PROMPT_TOO_LONG
    assert end_after_error(refused.value, 1) is TruncationReason.CONTEXT


@pytest.mark.parametrize(
    ("name", "version"),
    [
        *[("4", 4), ("0", 0), (None, None), ("none", None), ("default", None), ("v4", None), ("-1", None)],
        *[("9" * 15, 10**15 - 1), ("9" * 16, None), ("9" * 5000, None), ("१२", None), ("²", None)],
    ],
)
def test_names_that_no_trainer_gave_have_no_version(name, version):
    weight_info = msgspec.json.decode(msgspec.json.encode({"weight_version": name}), type=WeightInfo)
    assert policy_version(weight_info.weight_version) == version


def test_a_request_spells_out_every_option_on_both_routes():
    sampling = SamplingOptions(
        temperature=0.7,
        max_tokens=3,
        min_tokens=9,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        logit_bias={4: -2.0},
        stop=("x",),
        stop_token_ids=(2,),
        seed=8,
    )
    one = msgspec.json.decode(GenerateApi().encode(SamplingRequest([5], sampling, model="m")))
    other = msgspec.json.decode(
        CompletionsApi().encode(SamplingRequest([5], sampling, model="m", top_logprobs=3, request_id="probe-1"))
    )
    assert one["token_ids"] == other["prompt"] == [5]
    assert one["model"] == other["model"] == "m"
    expected = {"temperature": 0.7, "max_tokens": 3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 8}
    expected |= {"logit_bias": {"4": -2.0}, "stop": ["x"], "stop_token_ids": [2]}
    expected |= {"min_tokens": 3}  # no engine accepts more than max_tokens
    assert expected.items() <= one["sampling_params"].items()
    assert expected.items() <= other.items()
    assert (one["sampling_params"]["logprobs"], other["logprobs"], other["request_id"]) == (0, 3, "probe-1")
    assert "request_id" not in one, "an empty id would be shared by all requests"
