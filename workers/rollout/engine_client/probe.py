"""What an engine is and can do, found out by asking it: when a client meets it, and again when it was away.

Log-probs are of the raw logits unless vLLM is told otherwise, whatever the temperature was. Which they are is measured:
of two tokens the log-probs at temperature 1/2 lie twice as far apart as at 1 where they are processed, and as far apart
where they are raw.
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
from workers.engine_api.connection import QUERY_TIMEOUT_S, ConnectionPool
from workers.engine_api.wire import PROBE_PREFIX
from workers.rollout.engine_client.completions_api import CompletionsApi
from workers.rollout.engine_client.generate_api import GenerateApi
from workers.rollout.engine_client.sampled_turn import UNVERSIONED, IncompatibleEngineError
from workers.rollout.engine_client.sampling import SamplingOptions
from workers.rollout.engine_client.sampling_api import SamplingApi, SamplingRequest

log = structlog.get_logger()

_TOP_LOGPROBS: Final = 3
"""One may be the sampled token, so that two others are left."""
_PROMPTS: Final = ((1,), (3,), (5, 7), (11, 2), (13,))
"""Any will do whose two likeliest tokens are not equally likely."""
_RAW, _PROCESSED = (0.8, 1.25), (1.6, 2.5)
"""How far log-probs at temperature 1/2 lie apart, in units of those at 1."""
_PRESENT: Final = (200, 400, 422)
"""Of a route that is open, to an empty request."""
ABSENT: Final = (403, 404, 405)
"""Of one that a server does not have, or keeps closed."""
_MIN_GAP: Final = 0.02
"""Of log-probs; below it rounding could decide."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a probe found."""

    server_version: str
    """As the server calls itself."""
    model: str
    """The name that it is served under."""
    max_length: int
    """Tokens of a sequence, prompt included; 0 where it does not say."""
    api: SamplingApi
    """How it is asked for tokens."""
    reports_version: bool
    """It says which policy version it has."""
    reports_spans: bool
    """Its answers say which policy version sampled which token; else it is asked before and after."""


class EngineProbe:
    """Finds out what an engine is.

    Args:
        connection: the way to it.
        sampling_options: how the run samples; none: at temperature 1 from the whole vocabulary.
        timeout_s: for one token.
    """

    def __init__(
        self, connection: ConnectionPool, *, sampling_options: Sequence[SamplingOptions], timeout_s: float
    ) -> None:
        self._connection = connection
        self._sampling_options = list(sampling_options) or [SamplingOptions(temperature=1.0, max_tokens=1)]
        self._timeout_s = timeout_s

    async def inspect(self, url: str) -> Capabilities:
        """Ask it everything.

        Raises:
            IncompatibleEngineError: it lacks something; the message names it, and what helps.
            EngineError: it answers, but not as vLLM does.
        """
        version = await self._connection.get(f"{url}/version", dict[str, Any])
        models = await self._connection.get(f"{url}/v1/models", dict[str, Any])
        try:
            first = models["data"][0]
            server_version, model, max_length = (
                str(version["version"]),
                str(first["id"]),
                int(first.get("max_model_len") or 0),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise IncompatibleEngineError(
                f"{url} answers, but /version or /v1/models is not that of vLLM's API"
            ) from error
        reports_version = await self._has_route("GET", f"{url}/weight_info")
        api: SamplingApi = GenerateApi() if await self._has_route("POST", url + GenerateApi.path) else CompletionsApi()
        target = _Target(url, model, api)
        tried = [await self._try_sampling(target, sampling) for sampling in self._sampling_options]
        if not all(sampling.matches_raw_logits for sampling in self._sampling_options):
            await self._check_logprobs(target)
        longest = max(sampling.max_tokens for sampling in self._sampling_options)
        if 0 < max_length < longest:
            log.warning("engine.context_too_short", url=url, max_length=max_length, rollout_max_tokens=longest)
        log.info("engine.found", url=url, version=server_version, model=model, route=api.path, max_length=max_length)
        return Capabilities(
            server_version, model, max_length, api, reports_version, reports_spans=all(map(api.reports_versions, tried))
        )

    async def _has_route(self, method: str, url: str) -> bool:
        """Whether there is such a route; what is there refuses an empty request."""
        status, payload = await self._connection.request(
            method, url, QUERY_TIMEOUT_S, b"{}" if method == "POST" else None
        )
        if status not in (*_PRESENT, *ABSENT):
            raise EngineError(describe_response(url, status, payload))
        return status in _PRESENT

    async def _check_logprobs(self, target: "_Target") -> None:
        """See what the log-probs are of."""
        url = target.url
        gap_at_1, gap_at_half = 0.0, 0.0
        for prompt in _PROMPTS:
            flat = await self._top_logprobs(target, prompt, 1.0)
            sharp = await self._top_logprobs(target, prompt, 0.5)
            gap_at_1, gap_at_half = max((gap_at_1, gap_at_half), (flat[0] - flat[1], sharp[0] - sharp[1]))
        ratio = gap_at_half / gap_at_1 if gap_at_1 > _MIN_GAP else math.nan
        log.info("engine.logprobs_measured", url=url, apart=ratio)
        if _RAW[0] <= ratio <= _RAW[1]:
            raise IncompatibleEngineError(
                f"{url} gives log-probs of the raw logits, whatever it samples from, but this run samples at a "
                "temperature other than 1, or from a distribution that its settings change; start vLLM with "
                "--logprobs-mode processed_logprobs, or sample at temperature 1"
            )
        if not _PROCESSED[0] <= ratio <= _PROCESSED[1]:
            raise IncompatibleEngineError(
                f"{url}: nobody can tell what its log-probs are of: at temperature 1/2 they lie {ratio:.3g} times as "
                "far apart as at 1, where 2 is expected of processed ones and 1 of raw ones; serve the model with "
                "vLLM and --logprobs-mode processed_logprobs"
            )

    async def _try_sampling(self, target: "_Target", sampling: SamplingOptions) -> bytes:
        """Have a token sampled as the run would."""
        try:
            return await self._sample(target, _PROMPTS[0], sampling.capped(1))
        except EngineRefusedError as error:
            raise IncompatibleEngineError(
                f"{error}; that is how it takes the run's own sampling, {sampling.description}"
            ) from error

    async def _top_logprobs(self, target: "_Target", prompt: Sequence[int], temperature: float) -> list[float]:
        """The log-probs of the likeliest first tokens, the highest first."""
        sampling = SamplingOptions(temperature=temperature, max_tokens=1)
        try:
            payload = await self._sample(target, prompt, sampling, top_logprobs=_TOP_LOGPROBS)
        except EngineRefusedError as error:
            raise IncompatibleEngineError(
                f"{error}; that was a request for the log-probs of {_TOP_LOGPROBS} likely tokens, by which it is found "
                f"out what they are of: start vLLM with --max-logprobs {_TOP_LOGPROBS} or more"
            ) from error
        found = target.api.first_top_logprobs(payload)
        if len(found) < 2:
            raise IncompatibleEngineError(
                f"{target.url} answers without the log-probs of likely tokens, though it was asked for them"
            )
        return found

    async def _sample(
        self, target: "_Target", prompt: Sequence[int], sampling: SamplingOptions, *, top_logprobs: int = 0
    ) -> bytes:
        """The answer to a request, once it was found to be a sample."""
        url, api, request_id = target.url, target.api, f"{PROBE_PREFIX}{uuid4().hex}"
        sampling = structs.replace(sampling, seed=0)  # as every request of a run has one
        body = api.encode(
            SamplingRequest(prompt, sampling, model=target.model, top_logprobs=top_logprobs, request_id=request_id)
        )
        status, payload = await self._connection.request("POST", url + api.path, self._timeout_s, body)
        api.decode(status, payload, url, version=UNVERSIONED)
        return payload


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    model: str
    api: SamplingApi
