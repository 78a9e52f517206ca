"""`POST /v1/completions` with token ids: every vLLM has it, but its answers name no policy version.

Requests spell out every sampling parameter: vLLM fills a missing one from the model's `generation_config.json`,
including top-k and repetition penalty.
"""

from typing import Any, ClassVar

import msgspec
from msgspec import Struct, field

from stream.errors import EngineError
from stream.records import Span
from workers.engine_api.connection_pool import decode_response
from workers.engine_api.wire import FinishReason, TokenId
from workers.rollout.engine_client.sampled_turn import SampledTurn, single_choice, validate_sample
from workers.rollout.engine_client.sampling_api import SamplingRequest, ids_json

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
