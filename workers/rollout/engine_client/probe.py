"""Find out what an engine is and can do, by asking it: when a client meets it, and again after every ejection.

By default, vLLM reports log-probs of the raw logits at every temperature. The probe measures which kind it
gets: processed log-probs of two tokens lie twice as far apart at temperature 1/2 as at 1, raw ones equally far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import structlog
from msgspec import structs

from envs.remote.service_client import describe_response
from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.connection_pool import QUERY_TIMEOUT_S, ConnectionPool
from workers.engine_api.engine_queries import WEIGHT_INFO_PATH, fetch_weight_info
from workers.engine_api.wire import PROBE_PREFIX
from workers.rollout.engine_client.sampling import UNVERSIONED, IncompatibleEngineError, SamplingOptions
from workers.rollout.engine_client.sampling_apis import CompletionsApi, GenerateApi, SamplingApi, SamplingRequest

log = structlog.get_logger()

_TOP_LOGPROBS: Final = 3
"""Two are compared, and one of the reported ones may be the sampled token."""
_PROMPTS: Final = ((1,), (3,), (5, 7), (11, 2), (13,))
"""Any prompt works whose two most likely next tokens differ in probability; several are tried."""
_RAW, _PROCESSED = (0.8, 1.25), (1.6, 2.5)
"""Ranges of the ratio of log-prob gaps, temperature 1/2 to 1."""
_PRESENT: Final = (200, 400, 422)
"""Statuses with which an open route answers an empty request."""
ABSENT: Final = (403, 404, 405)
"""Statuses of a route that a server lacks or keeps closed."""
_MIN_GAP: Final = 0.02
"""Smallest gap of log-probs that rounding cannot distort."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Result of a probe."""

    server_version: str
    model: str
    """Name that the model is served under."""
    max_length: int
    """Longest sequence in tokens, including the prompt; 0 if unknown."""
    api: SamplingApi
    reports_version: bool
    """`/weight_info` names the policy version that the engine has."""
    reports_spans: bool
    """Answers name the policy version of each token; otherwise the client asks before and after each request."""
    merges_adapters: bool
    """Adapters are added to the engine's weights; otherwise a request names the one that samples it."""


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    model: str
    api: SamplingApi


class EngineProbe:
    """Inspects engines.

    Args:
        connections: HTTP connections.
        sampling_options: every way in which the run samples; none: temperature 1, whole vocabulary.
        timeout_s: for one token.
    """

    def __init__(
        self, connections: ConnectionPool, *, sampling_options: Sequence[SamplingOptions], timeout_s: float
    ) -> None:
        self._connections = connections
        self._sampling_options = list(sampling_options) or [SamplingOptions(temperature=1.0, max_tokens=1)]
        self._timeout_s = timeout_s

    async def inspect(self, url: str) -> Capabilities:
        """Probe one engine.

        Raises:
            IncompatibleEngineError: it lacks something that the run needs; the message says what, and the remedy.
            EngineError: it fails to answer.
        """
        version = await self._connections.get(f"{url}/version", dict[str, Any])
        models = await self._connections.get(f"{url}/v1/models", dict[str, Any])
        try:
            first = models["data"][0]
            server_version, model = str(version["version"]), str(first["id"])
            max_length = int(first.get("max_model_len") or 0)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise IncompatibleEngineError(
                f"{url} answers, but /version or /v1/models is not that of vLLM's API"
            ) from error
        reports_version = await self._has_route("GET", url + WEIGHT_INFO_PATH)
        merges_adapters = reports_version and (await fetch_weight_info(self._connections, url)).merges_adapters
        api: SamplingApi = GenerateApi() if await self._has_route("POST", url + GenerateApi.path) else CompletionsApi()
        target = _Target(url, model, api)
        answers = [await self._try_sampling(target, options) for options in self._sampling_options]
        if not all(options.matches_raw_logits for options in self._sampling_options):
            await self._check_logprobs(target)
        longest = max(options.max_tokens for options in self._sampling_options)
        if 0 < max_length < longest:
            log.warning("engine.context_too_short", url=url, max_length=max_length, rollout_max_tokens=longest)
        log.info("engine.found", url=url, version=server_version, model=model, route=api.path, max_length=max_length)
        reports_spans = all(map(api.reports_versions, answers))
        return Capabilities(server_version, model, max_length, api, reports_version, reports_spans, merges_adapters)

    async def _has_route(self, method: str, url: str) -> bool:
        """Whether the server has this route; one that is there refuses an empty request."""
        body = b"{}" if method == "POST" else None
        status, payload = await self._connections.request(method, url, QUERY_TIMEOUT_S, body)
        if status not in (*_PRESENT, *ABSENT):
            raise EngineError(describe_response(url, status, payload))
        return status in _PRESENT

    async def _check_logprobs(self, target: _Target) -> None:
        """Require log-probs of the distribution that is sampled from."""
        url = target.url
        gap_at_1, gap_at_half = 0.0, 0.0
        for prompt in _PROMPTS:
            flat = await self._top_logprobs(target, prompt, 1.0)
            sharp = await self._top_logprobs(target, prompt, 0.5)
            gap_at_1, gap_at_half = max((gap_at_1, gap_at_half), (flat[0] - flat[1], sharp[0] - sharp[1]))
        ratio = gap_at_half / gap_at_1 if gap_at_1 > _MIN_GAP else math.nan
        log.info("engine.logprobs_measured", url=url, ratio=ratio)
        if _RAW[0] <= ratio <= _RAW[1]:
            raise IncompatibleEngineError(
                f"{url} gives log-probs of the raw logits, whatever it samples from, but this run samples at a "
                "temperature other than 1, or from a distribution that its settings change; start vLLM with "
                "--logprobs-mode processed_logprobs, or sample at temperature 1"
            )
        if not _PROCESSED[0] <= ratio <= _PROCESSED[1]:
            raise IncompatibleEngineError(
                f"{url}: cannot tell what its log-probs are of: at temperature 1/2 they lie {ratio:.3g} times as far "
                "apart as at 1, where 2 is expected of processed ones and 1 of raw ones; serve the model with vLLM and "
                "--logprobs-mode processed_logprobs"
            )

    async def _try_sampling(self, target: _Target, options: SamplingOptions) -> bytes:
        """Sample one token as the run would, and return the answer."""
        try:
            return await self._sample(target, _PROMPTS[0], options.capped(1))
        except EngineRefusedError as error:
            raise IncompatibleEngineError(
                f"{error}; that was a request with the run's own sampling options, {options.description}"
            ) from error

    async def _top_logprobs(self, target: _Target, prompt: Sequence[int], temperature: float) -> list[float]:
        """Return the log-probs of the most likely first tokens, highest first."""
        options = SamplingOptions(temperature=temperature, max_tokens=1)
        try:
            payload = await self._sample(target, prompt, options, top_logprobs=_TOP_LOGPROBS)
        except EngineRefusedError as error:
            raise IncompatibleEngineError(
                f"{error}; that was a request for the log-probs of {_TOP_LOGPROBS} likely tokens, which show what the "
                f"engine's log-probs are of: start vLLM with --max-logprobs {_TOP_LOGPROBS} or more"
            ) from error
        found = target.api.first_top_logprobs(payload)
        if len(found) < 2:
            raise IncompatibleEngineError(
                f"{target.url} answers without the log-probs of likely tokens, though the request asked for them"
            )
        return found

    async def _sample(
        self, target: _Target, prompt: Sequence[int], options: SamplingOptions, *, top_logprobs: int = 0
    ) -> bytes:
        """Send a request, and return its answer if that is a valid sample."""
        url, api, request_id = target.url, target.api, f"{PROBE_PREFIX}{uuid4().hex}"
        options = structs.replace(options, seed=0)  # every request of a run has a seed
        request = SamplingRequest(prompt, options, model=target.model, top_logprobs=top_logprobs, request_id=request_id)
        status, payload = await self._connections.request("POST", url + api.path, self._timeout_s, api.encode(request))
        api.decode(status, payload, url, version=UNVERSIONED)
        return payload
