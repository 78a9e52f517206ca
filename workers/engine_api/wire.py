"""Messages between engine and client: vLLM's tokens-in, tokens-out protocol as records. Does not import torch."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from stream.errors import EngineRefusedError

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "wait", "abort"]

UNNAMED_WEIGHTS = "none"
"""Version in spans of an engine that has received no numbered weights yet."""

PROBE_PREFIX = "probe-"
"""Prefix of the ids of requests that only find out what an engine can do."""

UNKNOWN_LOGPROB = -9999.0
"""Placeholder for an unknown log-prob, and the lowest value: JSON has neither NaN nor infinity."""

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
"""A token id in an answer."""

NO_TOKEN_ID = -1
"""Default token id of log-probs from older vLLM versions, which omit it."""

WEIGHT_TRANSFER_BACKEND = "penstock"
"""Weight-transfer backend of the local engine, and of vLLM with Penstock's plugin."""

_MAX_VERSION_DIGITS = 15
"""A longer number is no policy version: it names weights of another tool, and no record could hold it."""

NEEDS_DIGESTS = "send the sha256 of its files"
"""Part of an engine's refusal of a path that it has no reason to trust; a run that sends the digests has one."""

UPDATE_SEQUENCE = "pause, start_weight_update, update_weights, finish_weight_update, resume"
"""Order of the control routes, for messages."""


ADAPTER_PREFIX = "policy-v"
"""Prefix of the names of a run's adapters; one adapter per policy version."""


def adapter_name(version: int) -> str:
    """Return the name of a policy version's adapter on engines; a name is never reused for other weights."""
    return f"{ADAPTER_PREFIX}{version}"


def policy_version(name: str | None) -> int | None:
    """Return the policy version that a weights' name stands for; None if no trainer pushed the weights."""
    is_number = name is not None and name.isascii() and name.isdecimal() and len(name) <= _MAX_VERSION_DIGITS
    return int(name) if is_number and name is not None else None


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters of a request. Unknown parameters are refused, never ignored."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """0 is greedy."""
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Number of tokens before which no stop token is sampled and stop strings are ignored."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Return the log-prob of each sampled token, and of this many most likely tokens at its position."""
    stop: list[str] = field(default_factory=list)
    """Stop strings; generation ends with the token that completes one."""
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """0 and -1: off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = field(default_factory=dict)
    """Values added to the logits of these tokens before division by the temperature."""
    ignore_eos: bool = False

    @property
    def truncates(self) -> bool:
        """Whether sampling is restricted to a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class GenerateRequest(Struct, kw_only=True, omit_defaults=True):
    """Body of `POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    """Name of the request; probes begin with `PROBE_PREFIX`."""
    model: str | None = None
    stream: bool = False
    cache_salt: str = ""
    """Only requests with equal salts share cached prefixes. Unused by the local engine: new weights clear its cache."""


class TokenLogprob(Struct):
    """A token and its log-prob."""

    logprob: float
    token_id: int = NO_TOKEN_ID


class SampledLogprob(Struct, omit_defaults=True):
    """Entry of `choices[].logprobs.content`: the log-prob of one sampled token."""

    logprob: float
    token_id: int = NO_TOKEN_ID
    top_logprobs: list[TokenLogprob] = field(default_factory=list)
    """The most likely tokens at this position, if requested; may include the sampled one."""


class Logprobs(Struct):
    """`choices[].logprobs`."""

    content: list[SampledLogprob]


class VersionSpan(Struct):
    """Sampled tokens [start, end) were sampled from this version of the weights."""

    version: str
    start: int
    end: int


class CompletionChoice(Struct, kw_only=True):
    """One sampled sequence."""

    index: int = 0
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class GenerateResponse(Struct, kw_only=True):
    """Answer of `POST /inference/v1/generate`."""

    request_id: str
    choices: list[CompletionChoice]


class CacheInfo(Struct, frozen=True):
    """Memory that an engine's keys and values take."""

    bytes: int
    max_bytes: int


class WeightInfo(Struct):
    """Answer of `GET /weight_info`."""

    weight_version: str | None = None
    """Name of the weights; `policy_version` converts it to a number."""
    cache: CacheInfo | None = None
    """None: the engine does not say, as vLLM."""
    merges_adapters: bool = False
    """An update may be a LoRA adapter, which the engine adds to its weights. vLLM serves each adapter beside them."""


class WeightFile(Struct):
    """A file of an update that engines download."""

    name: str
    size: int
    """Size in bytes."""
    sha256: str
    """Digest in hex digits."""


class UpdateInfo(Struct, forbid_unknown_fields=True):
    """`update_info` of `POST /update_weights`: `path`, which may come with `files`, or `url` with `files`."""

    path: str | None = None
    """Folder of a model or an adapter, or a safetensors file; outside of the run's folder only with `files`."""
    url: str | None = None
    """URL of the folder that holds the files, ending in a slash."""
    files: list[WeightFile] = field(default_factory=list)


class UpdateWeightsRequest(Struct):
    """Body of `POST /update_weights`."""

    update_info: UpdateInfo


class FinishUpdateRequest(Struct):
    """Body of `POST /finish_weight_update`."""

    weight_version: str


_generate_request_decoder = msgspec.json.Decoder(GenerateRequest)


def decode_generate_request(body: bytes) -> GenerateRequest:
    """Decode the body of a generate request.

    Raises:
        EngineRefusedError: the body is invalid; names all unknown sampling parameters.
    """
    try:
        return _generate_request_decoder.decode(body)
    except ValueError as error:
        raise EngineRefusedError(_unknown_parameters(body) or f"bad request: {error}") from error


def _unknown_parameters(body: bytes) -> str:
    """Return a message that names all unknown sampling parameters; empty if there are none."""
    try:
        table: Any = msgspec.json.decode(body)
    except ValueError:
        return ""
    given = table.get("sampling_params") if isinstance(table, dict) else None
    known = SamplingParams.__struct_fields__
    unknown = sorted(set(given) - set(known)) if isinstance(given, dict) else []
    if not unknown:
        return ""
    return f"unknown sampling parameters: {', '.join(unknown)}; known ones: {', '.join(known)}"


def error_body(message: str) -> bytes:
    """Return the body of a response with status 4xx or 5xx."""
    return msgspec.json.encode({"error": {"message": message}})


def build_response(
    request: GenerateRequest,
    token_ids: list[int],
    logprobs: list[float],
    finish_reason: FinishReason,
    spans: list[VersionSpan],
    top_logprobs: Sequence[list[TokenLogprob]] = (),
) -> GenerateResponse:
    """Build a response; includes log-probs only if the request asks for them."""
    content = None
    if request.sampling_params.logprobs is not None:
        content = Logprobs([SampledLogprob(number, token) for token, number in zip(token_ids, logprobs, strict=True)])
        for entry, others in zip(content.content, top_logprobs, strict=False):
            entry.top_logprobs = others
    choice = CompletionChoice(token_ids=token_ids, finish_reason=finish_reason, logprobs=content, weight_versions=spans)
    return GenerateResponse(request_id=request.request_id, choices=[choice])
