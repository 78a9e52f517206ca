"""One sampled turn, and the checks that an engine's answer has to pass before it counts as one."""

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeVar

from msgspec import Struct

from stream.errors import EngineError
from stream.records import Span
from workers.engine_api.wire import UNKNOWN_LOGPROB, FinishReason, policy_version

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
