"""How a request for tokens is written to an engine, and how its answer is read.

`POST /inference/v1/generate` takes and gives token ids, with the policy version of every token. Every vLLM has `POST
/v1/completions` with token ids, but its answers name no policy version.

Requests spell out every sampling parameter: vLLM fills a missing one from the model's `generation_config.json`,
including top-k and repetition penalty.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import msgspec
from msgspec import Struct, field

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
from workers.rollout.engine_client.sampling import (
    SampledTurn,
    SamplingOptions,
    single_choice,
    validate_sample,
    version_from_name,
)
from workers.rollout.token_ids import TokenIds


class SamplingRequest(Struct, frozen=True):
    """One request for tokens."""

    prompt_ids: Sequence[int]
    """The whole context."""
    options: SamplingOptions
    model: str
    """Name that the engine serves the model or adapter under."""
    top_logprobs: int = 0
    """Number of most likely tokens to report with their log-probs, besides the sampled one."""
    request_id: str = ""
    """Empty: the engine makes one."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""


def ids_json(ids: Sequence[int]) -> msgspec.Raw:
    """Return token ids as JSON, which `TokenIds` have already: a context may have 128,000."""
    return msgspec.Raw(ids.json if isinstance(ids, TokenIds) else msgspec.json.encode(list(ids)))


class SamplingApi(Protocol):
    """One HTTP route of an engine: token ids in, token ids with log-probs out."""

    path: ClassVar[str]

    def encode(self, request: SamplingRequest) -> bytes:
        """Write the body of a request."""

    def decode(self, status: int, payload: bytes, url: str, *, version: int) -> SampledTurn:
        """Read and validate an answer.

        Args:
            status: HTTP status.
            payload: body of the answer.
            url: base URL of the engine, for messages.
            version: policy version of all tokens if the answer names none: the older of those before and after it.

        Raises:
            EngineRefusedError: a 4xx other than 408 and 429.
            EngineError: anything else that is not a valid sample: another status, a malformed body, an abort, no
                tokens, or tokens without a finite log-prob or a policy version.
        """

    def reports_versions(self, payload: bytes, /) -> bool:
        """Whether this answer names the policy version of every token."""

    def first_top_logprobs(self, payload: bytes) -> list[float]:
        """Return the log-probs of the most likely first tokens, highest first; empty if the answer has none."""


_encoder = msgspec.json.Encoder()
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1}


class _Logprobs(Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)


class _Choice(Struct):
    finish_reason: FinishReason
    token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None


class _Response(Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Response)


class CompletionsApi:
    """The route that every vLLM has."""

    path: ClassVar[str] = "/v1/completions"

    def encode(self, request: SamplingRequest) -> bytes:
        """See `SamplingApi`."""
        params: dict[str, Any] = msgspec.to_builtins(request.options.to_wire(request.top_logprobs), str_keys=True)
        return _encoder.encode(
            {
                "model": request.model,
                "prompt": ids_json(request.prompt_ids),
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                **_NEUTRAL,
                **params,
                **({"request_id": request.request_id} if request.request_id else {}),
                **({"cache_salt": request.cache_salt} if request.cache_salt else {}),
            }
        )

    def decode(self, status: int, payload: bytes, url: str, *, version: int) -> SampledTurn:
        """See `SamplingApi`."""
        choice = single_choice(decode_response(status, payload, url, _decoder).choices, url)
        if choice.token_ids is None:
            raise EngineError(f"{url}{self.path} answers without token ids; it needs a vLLM that has return_token_ids")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
        spans = [Span(version, 0, len(choice.token_ids))]
        return validate_sample(choice.token_ids, logprobs, choice.finish_reason, spans, url)

    def reports_versions(self, _payload: bytes, /) -> bool:
        """See `SamplingApi`; always false."""
        return False

    def first_top_logprobs(self, payload: bytes) -> list[float]:
        """See `SamplingApi`."""
        choice = decode_response(200, payload, self.path, _decoder).choices[0]
        first = choice.logprobs.top_logprobs[:1] if choice.logprobs else []
        return sorted((first[0] or {}).values(), reverse=True) if first else []


_generate_decoder = msgspec.json.Decoder(GenerateResponse)


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


class _GeneratedLogprobs(Struct, gc=False):
    content: list[_Entry]


class _GeneratedChoice(Struct):
    token_ids: list[TokenId]
    finish_reason: FinishReason
    logprobs: _GeneratedLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class _Answer(Struct):
    request_id: str
    choices: list[_GeneratedChoice]


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
        return decode_response(200, payload, self.path, _generate_decoder).choices[0].weight_versions is not None

    def first_top_logprobs(self, payload: bytes) -> list[float]:
        """See `SamplingApi`."""
        choice = decode_response(200, payload, self.path, _generate_decoder).choices[0]
        first = choice.logprobs.content[:1] if choice.logprobs else []
        return sorted((entry.logprob for entry in first[0].top_logprobs), reverse=True) if first else []
