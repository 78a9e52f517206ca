"""`POST /v1/completions` with token ids: what every vLLM has, but it says nothing of policy versions.

Every parameter is written out: what is left out is taken from the model's `generation_config.json`, top-k and
repetition penalty among it.
"""

from typing import Any, ClassVar

import msgspec
from msgspec import Struct, field

from stream.errors import EngineError
from stream.records import Span
from workers.engine.connection import decoded
from workers.engine.wire import FinishReason
from workers.rollout.engine.answer import Sampled, believed, only
from workers.rollout.engine.route import Request

_encoder = msgspec.json.Encoder()
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1}


class _Logprobs(Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)


class _Choice(Struct):
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Response(Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Response)


class Completions:
    """The route of any vLLM."""

    path: ClassVar[str] = "/v1/completions"

    def body(self, request: Request) -> bytes:
        """Write a request; see `Route`."""
        sampling = request.sampling.on_the_wire(request.alternatives)
        params: dict[str, Any] = msgspec.to_builtins(sampling, str_keys=True)
        return _encoder.encode(
            {
                "model": request.model,
                "prompt": list(request.prompt_ids),
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                **_NEUTRAL,
                **params,
                **({"request_id": request.name} if request.name else {}),
                **({"cache_salt": request.salt} if request.salt else {}),
            }
        )

    def read(self, status: int, payload: bytes, url: str, *, version: int) -> Sampled:
        """Read the answer; see `Route`."""
        choice = only(decoded(status, payload, url, _decoder).choices, url)
        if choice.token_ids is None:
            raise EngineError(
                f"{url}{self.path} answers without token ids; it takes a vLLM that knows return_token_ids"
            )
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
        spans = [Span(version, 0, len(choice.token_ids))]
        return believed(choice.token_ids, logprobs, choice.finish_reason, spans, url)

    def tells_versions(self, _payload: bytes, /) -> bool:
        """Never; see `Route`."""
        return False

    def likeliest(self, payload: bytes) -> list[float]:
        """The first token's alternatives; see `Route`."""
        choice = decoded(200, payload, self.path, _decoder).choices[0]
        first = choice.logprobs.top_logprobs[:1] if choice.logprobs else []
        return sorted((first[0] or {}).values(), reverse=True) if first else []
