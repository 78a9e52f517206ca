"""`POST /inference/v1/generate`: tokens in, tokens out, and the policy version of every one of them."""

from typing import ClassVar

import msgspec

from stream.errors import EngineError
from stream.records import Span
from workers.engine.connection import decoded
from workers.engine.wire import NO_ID, GenerateRequest, GenerateResponse
from workers.rollout.engine.answer import Sampled, believed, only, version_number
from workers.rollout.engine.route import Request

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(GenerateResponse)


class Generate:
    """The route of the local engine, and of vLLM with `--enable-scale-out`."""

    path: ClassVar[str] = "/inference/v1/generate"

    def body(self, request: Request) -> bytes:
        """Write a request; see `Route`."""
        return _encoder.encode(
            GenerateRequest(
                model=request.model,
                token_ids=list(request.prompt_ids),
                sampling_params=request.sampling.on_the_wire(request.alternatives),
                request_id=request.name,
                cache_salt=request.salt,
            )
        )

    def read(self, status: int, payload: bytes, url: str, *, version: int) -> Sampled:
        """Read the answer; see `Route`."""
        choice = only(decoded(status, payload, url, _decoder).choices, url)
        if choice.weight_versions is None:  # a vLLM from before it counted them
            spans = [Span(version, 0, len(choice.token_ids))]
        else:
            spans = [Span(version_number(span.version), span.start, span.end) for span in choice.weight_versions]
        entries = choice.logprobs.content if choice.logprobs else []
        if any(entry.token_id not in (token, NO_ID) for entry, token in zip(entries, choice.token_ids, strict=False)):
            raise EngineError(f"{url} answers log-probs of other tokens than those that it sampled")
        return believed(choice.token_ids, [entry.logprob for entry in entries], choice.finish_reason, spans, url)

    def tells_versions(self, payload: bytes, /) -> bool:
        """Whether spans come; see `Route`."""
        return decoded(200, payload, self.path, _decoder).choices[0].weight_versions is not None

    def likeliest(self, payload: bytes) -> list[float]:
        """The first token's alternatives; see `Route`."""
        choice = decoded(200, payload, self.path, _decoder).choices[0]
        first = choice.logprobs.content[:1] if choice.logprobs else []
        return sorted((entry.logprob for entry in first[0].top_logprobs), reverse=True) if first else []
