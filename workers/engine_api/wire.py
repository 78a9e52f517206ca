"""What engine and client say to one another: vLLM's tokens-in, tokens-out protocol as records. No torch."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from stream.errors import EngineRefusedError

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "wait", "abort"]

UNNAMED_WEIGHTS = "none"
"""Version in the spans of an engine that has never been given weights under a number."""

PROBE_PREFIX = "probe-"
"""So begin the names of requests by which a client finds out what an engine is."""

UNKNOWN_LOGPROB = -9999.0
"""The log-prob that is written where there is none, and none lies below: JSON has neither NaN nor infinity."""

NO_TOKEN_ID = -1
"""Where an older vLLM writes a log-prob without its token."""

WEIGHT_TRANSFER_BACKEND = "penstock"
"""The weight-transfer backend of the local engine, and of vLLM with our plugin."""

UPDATE_SEQUENCE = "pause, start_weight_update, update_weights, finish_weight_update, resume"
"""The order of the control routes, for messages."""


ADAPTER_PREFIX = "policy-v"
"""So begin the names of a run's adapters, each of one policy version."""


def adapter_name(version: int) -> str:
    """What the adapter of a policy version is called on engines. Never given twice: a name means one set of weights."""
    return f"{ADAPTER_PREFIX}{version}"


def policy_version(name: str | None) -> int | None:
    """Which policy version weights of this name are; None for those that no trainer gave."""
    return int(name) if name is not None and name.isdecimal() else None


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to sample. What is not listed here is refused, never ignored."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """0 is greedy."""
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens before which no stop token is sampled and no stop string counts."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Request the log-prob of each sampled token, and of this many of the most likely tokens at its position."""
    stop: list[str] = field(default_factory=list)
    """The token that completes one of them is the last."""
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """0 and -1: off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = field(default_factory=dict)
    """Added to the logits of these tokens, before the temperature divides them."""
    ignore_eos: bool = False

    @property
    def truncates(self) -> bool:
        """Whether the distribution is cut to a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class GenerateRequest(Struct, kw_only=True, omit_defaults=True):
    """Body of `POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    """A client's probes begin with `PROBE`."""
    model: str | None = None
    stream: bool = False
    cache_salt: str = ""
    """Only requests with the same one share cached prefixes. The local engine needs none: new weights empty its own."""


class TokenLogprob(Struct):
    """A token with its log-prob."""

    logprob: float
    token_id: int = NO_TOKEN_ID


class SampledLogprob(Struct, omit_defaults=True):
    """One entry of `choices[].logprobs.content`."""

    logprob: float
    token_id: int = NO_TOKEN_ID
    top_logprobs: list[TokenLogprob] = field(default_factory=list)
    """The likeliest tokens at this place, where they were asked for; the sampled one may be among them."""


class Logprobs(Struct):
    """`choices[].logprobs`."""

    content: list[SampledLogprob]


class VersionSpan(Struct):
    """Sampled tokens [start, end) come from this version of the weights."""

    version: str
    start: int
    end: int


class Choice(Struct, kw_only=True):
    """What was sampled."""

    index: int = 0
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class GenerateResponse(Struct, kw_only=True):
    """Answer of `POST /inference/v1/generate`."""

    request_id: str
    choices: list[Choice]


class WeightInfo(Struct):
    """Answer of `GET /weight_info`."""

    weight_version: str | None = None
    """What the weights are called; `policy_version` says which version of ours that is."""


class WeightFile(Struct):
    """One of the files of an update that is downloaded."""

    name: str
    size: int
    """Bytes."""
    sha256: str
    """Hex digits."""


class UpdateInfo(Struct, forbid_unknown_fields=True):
    """`update_info` of `POST /update_weights`: `path`, or `url` with `files`."""

    path: str | None = None
    """A folder in Hugging Face form, or a safetensors file."""
    url: str | None = None
    """Of the folder that holds the files, ending in a slash."""
    files: list[WeightFile] = field(default_factory=list)


class UpdateWeightsRequest(Struct):
    """Body of `POST /update_weights`."""

    update_info: UpdateInfo


class FinishUpdateRequest(Struct):
    """Body of `POST /finish_weight_update`."""

    weight_version: str


_generate_request_decoder = msgspec.json.Decoder(GenerateRequest)


def decode_generate_request(body: bytes) -> GenerateRequest:
    """Read the body of a generate request.

    Raises:
        EngineRefusedError: says what is wrong with it; unknown sampling parameters are named, all of them.
    """
    try:
        return _generate_request_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise EngineRefusedError(_unknown_parameters(body) or f"bad request: {error}") from error


def _unknown_parameters(body: bytes) -> str:
    """A message naming all sampling parameters that nobody here knows, or nothing."""
    try:
        table: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return ""
    given = table.get("sampling_params") if isinstance(table, dict) else None
    known = SamplingParams.__struct_fields__
    unknown = sorted(set(given) - set(known)) if isinstance(given, dict) else []
    if not unknown:
        return ""
    return f"unknown sampling parameters: {', '.join(unknown)}; known ones: {', '.join(known)}"


def error_body(message: str) -> bytes:
    """The body of a 4xx or 5xx."""
    return msgspec.json.encode({"error": {"message": message}})


def build_response(
    request: GenerateRequest,
    token_ids: list[int],
    logprobs: list[float],
    finish_reason: FinishReason,
    spans: list[VersionSpan],
    top_logprobs: Sequence[list[TokenLogprob]] = (),
) -> GenerateResponse:
    """Put an answer together; log-probs only where they were asked for."""
    content = None
    if request.sampling_params.logprobs is not None:
        content = Logprobs([SampledLogprob(number, token) for token, number in zip(token_ids, logprobs, strict=True)])
        for entry, others in zip(content.content, top_logprobs, strict=False):
            entry.top_logprobs = others
    choice = Choice(token_ids=token_ids, finish_reason=finish_reason, logprobs=content, weight_versions=spans)
    return GenerateResponse(request_id=request.request_id, choices=[choice])
