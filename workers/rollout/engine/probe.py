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

from envs.served.service import in_words
from stream.errors import EngineError, EngineRefusedError
from workers.engine.connection import QUESTION_S, Connection
from workers.engine.wire import PROBE
from workers.rollout.engine.answer import NONE_YET, UnfitError
from workers.rollout.engine.completions import Completions
from workers.rollout.engine.generate import Generate
from workers.rollout.engine.route import Request, Route
from workers.rollout.engine.sampling import Sampling

log = structlog.get_logger()

_ALTERNATIVES: Final = 3
"""One may be the sampled token, so that two others are left."""
_PROMPTS: Final = ((1,), (3,), (5, 7), (11, 2), (13,))
"""Any will do whose two likeliest tokens are not equally likely."""
_RAW, _PROCESSED = (0.8, 1.25), (1.6, 2.5)
"""How far log-probs at temperature 1/2 lie apart, in units of those at 1."""
_THERE: Final = (200, 400, 422)
"""Of a route that is open, to an empty request."""
ABSENT: Final = (403, 404, 405)
"""Of one that a server does not have, or keeps closed."""
_LEAST_GAP: Final = 0.02
"""Of log-probs; below it rounding could decide."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a probe found."""

    release: str
    """As the server calls itself."""
    model: str
    """The name that it is served under."""
    max_length: int
    """Tokens of a sequence, prompt included; 0 where it does not say."""
    route: Route
    """How it is asked for tokens."""
    versioned: bool
    """It says which policy version it has."""
    spans: bool
    """Its answers say which policy version sampled which token; else it is asked before and after."""


class Probe:
    """Finds out what an engine is.

    Args:
        connection: the way to it.
        samplings: how the run samples; none: at temperature 1 from the whole vocabulary.
        timeout_s: for one token.
    """

    def __init__(self, connection: Connection, *, samplings: Sequence[Sampling], timeout_s: float) -> None:
        self._connection = connection
        self._samplings = list(samplings) or [Sampling(temperature=1.0, max_tokens=1)]
        self._timeout_s = timeout_s

    async def look(self, url: str) -> Facts:
        """Ask it everything.

        Raises:
            UnfitError: it lacks something; the message names it, and what helps.
            EngineError: it answers, but not as vLLM does.
        """
        version = await self._connection.ask(f"{url}/version", dict[str, Any])
        models = await self._connection.ask(f"{url}/v1/models", dict[str, Any])
        try:
            first = models["data"][0]
            release, model, max_length = str(version["version"]), str(first["id"]), int(first.get("max_model_len") or 0)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UnfitError(f"{url} answers, but /version or /v1/models is not that of vLLM's API") from error
        versioned = await self._answers("GET", f"{url}/weight_info")
        route: Route = Generate() if await self._answers("POST", url + Generate.path) else Completions()
        target = _Target(url, model, route)
        tried = [await self._try(target, sampling) for sampling in self._samplings]
        if not all(sampling.of_raw_logits for sampling in self._samplings):
            await self._measure(target)
        longest = max(sampling.max_tokens for sampling in self._samplings)
        if 0 < max_length < longest:
            log.warning("engine.short", url=url, max_length=max_length, rollout_max_tokens=longest)
        log.info("engine.found", url=url, version=release, model=model, route=route.path, max_length=max_length)
        return Facts(release, model, max_length, route, versioned, spans=all(map(route.tells_versions, tried)))

    async def _answers(self, method: str, url: str) -> bool:
        """Whether there is such a route; what is there refuses an empty request."""
        status, payload = await self._connection.send(method, url, QUESTION_S, b"{}" if method == "POST" else None)
        if status not in (*_THERE, *ABSENT):
            raise EngineError(in_words(url, status, payload))
        return status in _THERE

    async def _measure(self, target: "_Target") -> None:
        """See what the log-probs are of."""
        url = target.url
        once, twice = 0.0, 0.0
        for prompt in _PROMPTS:
            flat = await self._likeliest(target, prompt, 1.0)
            sharp = await self._likeliest(target, prompt, 0.5)
            once, twice = max((once, twice), (flat[0] - flat[1], sharp[0] - sharp[1]))
        apart = twice / once if once > _LEAST_GAP else math.nan
        log.info("engine.logprobs_measured", url=url, apart=apart)
        if _RAW[0] <= apart <= _RAW[1]:
            raise UnfitError(
                f"{url} gives log-probs of the raw logits, whatever it samples from, but this run samples at a "
                "temperature other than 1, or from a distribution that its settings change; start vLLM with "
                "--logprobs-mode processed_logprobs, or sample at temperature 1"
            )
        if not _PROCESSED[0] <= apart <= _PROCESSED[1]:
            raise UnfitError(
                f"{url}: nobody can tell what its log-probs are of: at temperature 1/2 they lie {apart:.3g} times as "
                "far apart as at 1, where 2 is expected of processed ones and 1 of raw ones; serve the model with "
                "vLLM and --logprobs-mode processed_logprobs"
            )

    async def _try(self, target: "_Target", sampling: Sampling) -> bytes:
        """Have a token sampled as the run would."""
        try:
            return await self._sample(target, _PROMPTS[0], sampling.within(1))
        except EngineRefusedError as error:
            raise UnfitError(f"{error}; that is how it takes the run's own sampling, {sampling.in_words}") from error

    async def _likeliest(self, target: "_Target", prompt: Sequence[int], temperature: float) -> list[float]:
        """The log-probs of the likeliest first tokens, the highest first."""
        sampling = Sampling(temperature=temperature, max_tokens=1)
        try:
            payload = await self._sample(target, prompt, sampling, alternatives=_ALTERNATIVES)
        except EngineRefusedError as error:
            raise UnfitError(
                f"{error}; that was a request for the log-probs of {_ALTERNATIVES} likely tokens, by which it is found "
                f"out what they are of: start vLLM with --max-logprobs {_ALTERNATIVES} or more"
            ) from error
        found = target.route.likeliest(payload)
        if len(found) < 2:
            raise UnfitError(
                f"{target.url} answers without the log-probs of likely tokens, though it was asked for them"
            )
        return found

    async def _sample(
        self, target: "_Target", prompt: Sequence[int], sampling: Sampling, *, alternatives: int = 0
    ) -> bytes:
        """The answer to a request, once it was found to be a sample."""
        url, route, name = target.url, target.route, f"{PROBE}{uuid4().hex}"
        sampling = structs.replace(sampling, seed=0)  # as every request of a run has one
        body = route.body(Request(prompt, sampling, model=target.model, alternatives=alternatives, name=name))
        status, payload = await self._connection.send("POST", url + route.path, self._timeout_s, body)
        route.read(status, payload, url, version=NONE_YET)
        return payload


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    model: str
    route: Route
