"""Answers of an engine without a model, right ones and wrong ones, in the formats of both sampling routes."""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from workers.engine_api.wire import (
    UNKNOWN_LOGPROB,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    TokenLogprob,
    VersionSpan,
    build_response,
)

Fault = Literal[
    "500",
    "429",
    "busy",
    "400",
    "hang",
    "reset",
    "garbage",
    "count_mismatch",
    "nan_logprob",
    "unknown_logprob",
    "abort",
    "empty",
    "spans",
]
"""`busy` answers 503 with `Retry-After`, `hang` never answers, `reset` breaks the connection, `spans` leaves the last
token without a version (on the route that reports versions), `unknown_logprob` contains vLLM's placeholder for an
unknown log-prob."""

TOP_LOGIT = 17.0
"""Largest logit, in nats."""


def scripted_logprob(position: int, token: int) -> float:
    """Return the log-prob of `token` at `position` of the whole sequence: arbitrary but deterministic, in [-1, 0)."""
    return -((token * 2_654_435_761 + position * 40_503) % 1000 + 1) / 1000


def scripted_top_logprobs(params: SamplingParams, *, raw: bool) -> list[TokenLogprob]:
    """Return log-probs of three tokens with logits one nat apart, at the request's temperature unless `raw`."""
    temperature = 1.0 if raw else params.temperature or 1.0
    logits = [-token / temperature for token in range(3)]
    total = math.log(sum(map(math.exp, logits)))
    return [TokenLogprob(logit - total, token) for token, logit in enumerate(logits)][: params.logprobs]


def encode_generation(
    request: GenerateRequest,
    tokens: Sequence[int],
    spans: Sequence[VersionSpan],
    fault: Fault | None,
    *,
    is_cut: bool,
    raw_logprobs: bool,
    logits: bool,
) -> bytes:
    """Return an answer of `/inference/v1/generate`.

    Args:
        request: the request.
        tokens: sampled tokens; the fault `empty` removes them.
        spans: versions of the tokens.
        fault: what is wrong with the answer; None: nothing.
        is_cut: the reply was longer than the limit.
        raw_logprobs: report log-probs of the raw logits.
        logits: report logits instead of log-probs.
    """
    logprobs = [scripted_logprob(len(request.token_ids) + i, token) for i, token in enumerate(tokens)]
    reason: Literal["stop", "length", "abort"] = "length" if is_cut else "stop"
    top_logprobs = [scripted_top_logprobs(request.sampling_params, raw=raw_logprobs)] * len(tokens)
    answer = build_response(
        request, list(tokens), logprobs, "abort" if fault == "abort" else reason, list(spans), top_logprobs
    )
    content = answer.choices[0].logprobs
    for entry in content.content if logits and content is not None else ():
        entry.logprob += TOP_LOGIT
        entry.top_logprobs = [TokenLogprob(other.logprob + TOP_LOGIT, other.token_id) for other in top_logprobs[0]]
    if fault == "count_mismatch" and content is not None:
        content.content.pop()
    if fault == "unknown_logprob" and content is not None:
        content.content[0].logprob = UNKNOWN_LOGPROB
    payload = msgspec.json.encode(answer)
    if fault == "garbage":
        return payload[: len(payload) // 2]
    if fault == "nan_logprob" and content is not None:
        old = msgspec.json.encode(content.content[0])
        number = msgspec.json.encode(content.content[0].logprob)
        return payload.replace(old, old.replace(number, b"NaN", 1), 1)  # as Python's json writes it
    return payload


def encode_completion(generation: bytes, fault: Fault | None) -> bytes:
    """Return an answer of `/v1/completions`, which has no versions.

    Args:
        generation: the answer of `/inference/v1/generate` to the same request, without the faults of the encoding.
        fault: what is wrong with the answer; None: nothing.
    """
    choice = msgspec.json.decode(generation, type=GenerateResponse).choices[0]
    content = choice.logprobs.content if choice.logprobs else []
    logprobs = {
        "token_logprobs": [entry.logprob for entry in content],
        "top_logprobs": [{f"token_id:{t.token_id}": t.logprob for t in entry.top_logprobs} for entry in content],
    }
    answer = {"token_ids": choice.token_ids, "finish_reason": choice.finish_reason, "logprobs": logprobs}
    payload = msgspec.json.encode({"choices": [answer]})
    if fault == "nan_logprob":
        return payload.replace(b'"token_logprobs":[', b'"token_logprobs":[NaN', 1)
    return payload[: len(payload) // 2] if fault == "garbage" else payload
