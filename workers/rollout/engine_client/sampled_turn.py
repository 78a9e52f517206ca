"""What an engine answers, believed only where it agrees with itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from stream.errors import EngineError
from stream.records import Span
from workers.engine_api.wire import UNKNOWN_LOGPROB, FinishReason, policy_version

UNVERSIONED: Final = -1
"""Version of an engine that has not been given weights under a number."""
_LOGPROB_TOLERANCE: Final = 0.01
"""How far above 0 a log-prob may lie that was computed with few bits."""

T = TypeVar("T")


class IncompatibleEngineError(EngineError):
    """The engine lacks what the run needs of it."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One turn of the model."""

    token_ids: list[int]
    """A stop token that ended the turn is part of it."""
    logprobs: list[float]
    """Of each token, under the distribution that it was sampled from."""
    finish_reason: Literal["stop", "length"]
    spans: list[Span]
    """Policy versions, in indices of `token_ids`; -1 where the engine was never given weights."""


def is_truncated(finish_reason: str) -> bool:
    """Whether the engine says that it cut the turn off; never guessed from its length or its last token."""
    return finish_reason == "length"


def single_choice(choices: Sequence[T], url: str) -> T:
    """The one completion that was asked for.

    Raises:
        EngineError: there is none, or more than one.
    """
    if len(choices) != 1:
        raise EngineError(f"{url} answers {len(choices)} choices, not one")
    return choices[0]


def validate_sample(
    token_ids: list[int], logprobs: Sequence[float | None], finish_reason: FinishReason, spans: list[Span], url: str
) -> SampledTurn:
    """A sample, if what the answer says of it agrees with itself.

    Raises:
        IncompatibleEngineError: logits in place of log-probs.
        EngineError: an abort, no tokens, tokens without a log-prob, or without a policy version.
    """
    if finish_reason == "abort":
        raise EngineError(f"{url} aborted the request after {len(token_ids)} tokens")
    if not token_ids or len(logprobs) != len(token_ids):
        raise EngineError(f"{url} answers {len(token_ids)} tokens with {len(logprobs)} log-probs")
    known = [
        logprob for logprob in logprobs if logprob is not None and math.isfinite(logprob) and logprob > UNKNOWN_LOGPROB
    ]
    if len(known) < len(logprobs):
        raise EngineError(f"{url} answers a log-prob that is not finite")
    if max(known) > _LOGPROB_TOLERANCE:
        raise IncompatibleEngineError(
            f"{url} answers {max(known):.3g} as a log-prob, and none lies above 0: it tells logits; start vLLM with "
            "--logprobs-mode processed_logprobs"
        )
    edges = [0, *(span.end for span in spans)]
    starts = [span.start for span in spans]
    if starts != edges[:-1] or edges[-1] != len(token_ids) or any(s.end <= s.start for s in spans):
        raise EngineError(f"policy versions {spans} do not cover {len(token_ids)} tokens")
    return SampledTurn(token_ids, known, finish_reason, spans)


def version_from_name(name: str | None) -> int:
    """The policy version of weights of this name; `UNVERSIONED` for those that no trainer gave."""
    version = policy_version(name)
    return UNVERSIONED if version is None else version
