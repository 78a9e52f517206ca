"""Options for sampling one turn, the `Sampler` protocol, and how a failed turn ends an episode.

One sampled turn, and the checks that an engine's answer has to pass before it counts as one.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal, Protocol, TypeVar

from msgspec import Struct, structs

from stream.errors import EngineError, EngineRefusedError
from stream.records import Failure, Span
from stream.validity import RolloutReason, TruncationReason
from workers.engine_api.wire import UNKNOWN_LOGPROB, FinishReason, SamplingParams, policy_version
from workers.role.in_flight_reporter import CompletionProgress
from workers.settings import RolloutSettings

UNVERSIONED: Final = -1
"""Version of an engine whose weights no trainer has numbered."""
_LOGPROB_TOLERANCE: Final = 0.01
"""How far above 0 a log-prob may lie because of rounding in low precision."""

T = TypeVar("T")


class IncompatibleEngineError(EngineError):
    """The engine lacks something that the run needs."""


class SampledTurn(Struct, frozen=True):
    """One turn of the model, consistent in itself.

    Raises:
        EngineError: the number of log-probs differs from the number of tokens, a log-prob is not finite, or the spans
            leave gaps, overlap, or do not cover all tokens.
    """

    token_ids: list[int]
    """Includes the stop token that ended the turn."""
    logprobs: list[float]
    """One per token, under the distribution that it was sampled from."""
    finish_reason: Literal["stop", "length"]
    spans: list[Span]
    """Policy versions by index range of `token_ids`; version -1 where the engine never got numbered weights."""

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if len(self.logprobs) != count:
            raise EngineError(f"{count} tokens with {len(self.logprobs)} log-probs")
        if not math.isfinite(sum(self.logprobs)):  # a sum of finite log-probs is finite
            raise EngineError("a log-prob is not finite")
        end = 0
        for span in self.spans:
            if span.start != end or span.end <= span.start:
                break
            end = span.end
        else:
            if end == count:
                return
        raise EngineError(f"policy versions {self.spans} do not cover {count} tokens")

    @property
    def is_truncated(self) -> bool:
        """The engine reports that a limit cut the turn off; never guessed from its length or its last token."""
        return self.finish_reason == "length"


def single_choice(choices: Sequence[T], url: str) -> T:
    """Return the one completion of an answer.

    Raises:
        EngineError: the answer holds none, or more than one.
    """
    if len(choices) != 1:
        raise EngineError(f"{url} answers {len(choices)} choices, not one")
    return choices[0]


def validate_sample(
    token_ids: list[int], logprobs: Sequence[float | None], finish_reason: FinishReason, spans: list[Span], url: str
) -> SampledTurn:
    """Make a turn from the parts of an engine's answer.

    Raises:
        IncompatibleEngineError: the log-probs are logits.
        EngineError: the engine aborted the request, sampled nothing, or its answer is inconsistent.
    """
    if finish_reason == "abort":
        raise EngineError(f"{url} aborted the request after {len(token_ids)} tokens")
    if not token_ids:
        raise EngineError(f"{url}: 0 tokens with {len(logprobs)} log-probs")
    known = _known_logprobs(logprobs)
    highest = max(known, default=0.0)
    if highest > _LOGPROB_TOLERANCE:
        raise IncompatibleEngineError(
            f"{url} answers {highest:.3g} as a log-prob, but no log-prob is above 0, so these are logits; start vLLM "
            "with --logprobs-mode processed_logprobs"
        )
    try:
        return SampledTurn(token_ids, known, finish_reason, spans)
    except EngineError as error:
        raise EngineError(f"{url}: {error}") from error


def _known_logprobs(logprobs: Sequence[float | None]) -> list[float]:
    """Return the log-probs, with minus infinity for unknown ones; mostly all are known, and the list is returned."""
    try:
        if isinstance(logprobs, list) and min(logprobs, default=0.0) > UNKNOWN_LOGPROB:
            return logprobs
    except TypeError:  # None has no order; to look for it first would take longer than everything else
        pass
    return [-math.inf if logprob is None or logprob <= UNKNOWN_LOGPROB else logprob for logprob in logprobs]


def version_from_name(name: str | None) -> int:
    """Return the policy version that a weights' name stands for; `UNVERSIONED` if no trainer gave that name."""
    version = policy_version(name)
    return UNVERSIONED if version is None else version


_UNWATCHED = CompletionProgress()
"""For requests that belong to no episode; nobody reads it."""

_ODD: Final = 0x9E37_79B9_7F4A_7C15
"""Its multiples differ in the lowest 32 bits for the first 2**32 turns, since it is odd."""
_CACHED_SEEDS: Final = 4096
"""Episodes whose seeds are cached; more than a worker has in flight."""
_TOO_LONG_MESSAGES = ("maximum context length", "maximum model length")
"""Phrases with which vLLM's routes, and compatible servers, refuse a context that is too long."""


class SamplingOptions(Struct, frozen=True, kw_only=True):
    """How to sample one turn."""

    temperature: float
    max_tokens: int
    min_tokens: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    group: str = ""
    """Id of the group: its completions share a prefix, so they should share an engine. Empty: no group."""
    completion: int = 0
    """Index within the group: the turns of a completion share a prefix."""
    progress: CompletionProgress = _UNWATCHED
    """Where to note whether the turn waits for an engine, and which one samples it."""

    @classmethod
    def from_settings(
        cls,
        limits: RolloutSettings,
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...] = (),
        seed: int | None = None,
        group: str = "",
        completion: int = 0,
        progress: CompletionProgress = _UNWATCHED,
    ) -> "SamplingOptions":
        """Take the distribution from the run's settings."""
        sampling = limits.sampling
        return cls(
            temperature=limits.temperature,
            max_tokens=max_tokens,
            min_tokens=sampling.min_tokens,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            logit_bias=sampling.logit_bias,
            stop=sampling.stop,
            stop_token_ids=stop_token_ids,
            seed=seed,
            group=group,
            completion=completion,
            progress=progress,
        )

    @property
    def matches_raw_logits(self) -> bool:
        """Log-probs of the raw logits equal those of the sampling distribution."""
        is_biased = self.min_tokens or self.logit_bias
        is_restricted = self.top_p < 1 or self.top_k or self.min_p
        return not is_biased and (self.temperature == 0 or (self.temperature == 1 and not is_restricted))

    @property
    def description(self) -> str:
        """The options that differ from the defaults, for messages."""
        defaults = structs.asdict(SamplingOptions(temperature=math.nan, max_tokens=0))
        return ", ".join(f"{key} {value}" for key, value in structs.asdict(self).items() if value != defaults[key])

    def capped(self, max_tokens: int) -> "SamplingOptions":
        """Return a copy with at most `max_tokens`; unchanged if that is not positive."""
        return structs.replace(self, max_tokens=max_tokens) if 0 < max_tokens < self.max_tokens else self

    def to_wire(self, top_logprobs: int = 0) -> SamplingParams:
        """Convert to vLLM's parameters, with log-probs of sampled tokens and of the `top_logprobs` most likely."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            min_tokens=min(self.min_tokens, self.max_tokens),
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            logit_bias=dict(self.logit_bias),
            logprobs=top_logprobs,
            stop=list(self.stop),
            stop_token_ids=list(self.stop_token_ids),
            seed=self.seed,
        )


class Sampler(Protocol):
    """Samples turns; the engine client is one."""

    @property
    def context_length(self) -> int:
        """Tokens that every engine takes, answer included; 0 if none reports it."""

    async def sample(
        self, prompt_ids: Sequence[int], options: SamplingOptions, *, min_policy_version: int = 0
    ) -> SampledTurn:
        """Sample one turn.

        Args:
            prompt_ids: the whole context.
            options: temperature, limits, stop tokens.
            min_policy_version: oldest policy version that may sample any token; -1 allows engines without a version.

        Raises:
            EngineRefusedError: an engine refused this request; no other would take it.
            EngineError: this request fails while others succeed.
            EngineUnavailableError: no engine answers.
        """


def turn_seed(episode_seed: int, turn: int) -> int:
    """Return the seed of an episode's turn (from 0): within the 63 bits that engines take, distinct in the lowest 32.

    torch's CPU generator uses only the lowest 32 bits.
    """
    return (_first_turn_seed(episode_seed) + turn * _ODD) % 2**63


def context_seed(episode_seed: int, digest: bytes, number: int) -> int:
    """Return the seed of a turn that depends on no order of arrival.

    Args:
        episode_seed: of the episode.
        digest: of the conversation.
        number: of answers that were sampled before to the same conversation.
    """
    hashed = hashlib.blake2b(f"{episode_seed} {number} ".encode() + digest, digest_size=8).digest()
    return int.from_bytes(hashed, "little") >> 1


@lru_cache(maxsize=_CACHED_SEEDS)
def _first_turn_seed(episode_seed: int) -> int:
    """Return a hash: episodes of a group have consecutive seeds."""
    digest = hashlib.blake2b(str(episode_seed).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def end_after_error(error: EngineError, turns: int) -> Failure | TruncationReason:
    """Return how an episode ends when one of its turns could not be sampled.

    Args:
        error: why not.
        turns: turns of the model before it. A context that is too long fails the episode at its first turn, and
            truncates it later.
    """
    if not isinstance(error, EngineRefusedError) or not any(phrase in str(error) for phrase in _TOO_LONG_MESSAGES):
        return Failure(reason=RolloutReason.ENGINE, detail=str(error))
    if turns:
        return TruncationReason.CONTEXT
    return Failure(reason=RolloutReason.PROMPT_TOO_LONG, detail=str(error))


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there is one."""
    ends = [found for stop in stops if (found := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)
