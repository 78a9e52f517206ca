"""`POST /inference/v1/generate`: token ids in, token ids out, with the policy version of every token."""

from typing import ClassVar

import msgspec
from msgspec import Struct

from stream.errors import EngineError
from stream.records import Span
from workers.engine_api.connection_pool import decode_response
from workers.engine_api.wire import (
    NO_TOKEN_ID,
    FinishReason,
    GenerateResponse,
    SamplingParams,
    TokenId,
    VersionSpan,
)
from workers.rollout.engine_client.sampled_turn import SampledTurn, single_choice, validate_sample, version_from_name
from workers.rollout.engine_client.sampling_api import SamplingRequest, ids_json

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(GenerateResponse)


class _Request(Struct, kw_only=True, omit_defaults=True):
    """`GenerateRequest`, whose ids are JSON already."""

    token_ids: msgspec.Raw
    sampling_params: SamplingParams
    request_id: str = ""
    model: str | None = None
    cache_salt: str = ""


class _Entry(Struct, gc=False):
    """A sampled token's log-prob without what only the probe reads; the garbage collector need not visit it."""

    logprob: float
    token_id: int = NO_TOKEN_ID


class _Logprobs(Struct, gc=False):
    content: list[_Entry]


class _Choice(Struct):
    token_ids: list[TokenId]
    finish_reason: FinishReason
    logprobs: _Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class _Answer(Struct):
    request_id: str
    choices: list[_Choice]


_answer_decoder = msgspec.json.Decoder(_Answer)


class GenerateApi:
    """The route of the local engine, and of vLLM started with `--enable-scale-out`."""

    path: ClassVar[str] = "/inference/v1/generate"

    def encode(self, request: SamplingRequest) -> bytes:
        """See `SamplingApi`."""
        return _encoder.encode(
            _Request(
                model=request.model,
                token_ids=ids_json(request.prompt_ids),
                sampling_params=request.options.to_wire(request.top_logprobs),
                request_id=request.request_id,
                cache_salt=request.cache_salt,
            )
        )

    def decode(self, status: int, payload: bytes, url: str, *, version: int) -> SampledTurn:
        """See `SamplingApi`."""
        choice = single_choice(decode_response(status, payload, url, _answer_decoder).choices, url)
        if choice.weight_versions is None:  # older vLLM releases do not report them
            spans = [Span(version, 0, len(choice.token_ids))]
        else:
            spans = [Span(version_from_name(span.version), span.start, span.end) for span in choice.weight_versions]
        entries = choice.logprobs.content if choice.logprobs else []
        reported = [entry.token_id for entry in entries]
        if reported != choice.token_ids and any(
            other not in (token, NO_TOKEN_ID) for other, token in zip(reported, choice.token_ids, strict=False)
        ):
            raise EngineError(f"{url} answers log-probs of other tokens than those that it sampled")
        logprobs = [entry.logprob for entry in entries]
        return validate_sample(choice.token_ids, logprobs, choice.finish_reason, spans, url)

    def reports_versions(self, payload: bytes, /) -> bool:
        """See `SamplingApi`."""
        return decode_response(200, payload, self.path, _decoder).choices[0].weight_versions is not None

    def first_top_logprobs(self, payload: bytes) -> list[float]:
        """See `SamplingApi`."""
        choice = decode_response(200, payload, self.path, _decoder).choices[0]
        first = choice.logprobs.content[:1] if choice.logprobs else []
        return sorted((entry.logprob for entry in first[0].top_logprobs), reverse=True) if first else []
