"""What an engine answers, believed only where it agrees with itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import msgspec

from envs.served.service import error_text
from stream.errors import EngineError, EngineRefusedError
from stream.records import Span
from workers.engine.wire import UNKNOWN, FinishReason

NONE_YET: Final = -1
"""Version of an engine that has not been given weights under a number."""
_RETRIED = (408, 429)
_ROUNDING: Final = 0.01
"""How far above 0 a log-prob may lie that was computed with few bits."""

T = TypeVar("T")


class UnfitError(EngineError):
    """The engine lacks what the run needs of it."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One turn of the model."""

    token_ids: list[int]
    """A stop token that ended the turn is part of it."""
    logprobs: list[float]
    """Of each token, under the distribution that it was sampled from."""
    finish_reason: Literal["stop", "length"]
    spans: list[Span]
    """Policy versions, in indices of `token_ids`; -1 where the engine was never given weights."""


def cut_off(finish_reason: str) -> bool:
    """Whether the engine says that it cut the turn off; never guessed from its length or its last token."""
    return finish_reason == "length"


def decoded(status: int, payload: bytes, url: str, decoder: "msgspec.json.Decoder[T]") -> T:
    """The answer as a record.

    Raises:
        EngineRefusedError: a 4xx other than 408 and 429.
        EngineError: any other status than 200, or junk.
    """
    if status != 200:
        kind = EngineRefusedError if 400 <= status < 500 and status not in _RETRIED else EngineError
        raise kind(f"{url} answers {status}: {error_text(payload)}")
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise EngineError(f"{url} answers junk: {error}") from error


def believed(
    token_ids: list[int], logprobs: Sequence[float | None], finish_reason: FinishReason, spans: list[Span], url: str
) -> Sampled:
    """A sample, if what the answer says of it agrees with itself.

    Raises:
        UnfitError: logits in place of log-probs.
        EngineError: an abort, no tokens, tokens without a log-prob, or without a policy version.
    """
    if finish_reason == "abort":
        raise EngineError(f"{url} aborted the request after {len(token_ids)} tokens")
    if not token_ids or len(logprobs) != len(token_ids):
        raise EngineError(f"{url} answers {len(token_ids)} tokens with {len(logprobs)} log-probs")
    known = [logprob for logprob in logprobs if logprob is not None and math.isfinite(logprob) and logprob > UNKNOWN]
    if len(known) < len(logprobs):
        raise EngineError(f"{url} answers a log-prob that is not finite")
    if max(known) > _ROUNDING:
        raise UnfitError(
            f"{url} answers {max(known):.3g} as a log-prob, and none lies above 0: it tells logits; start vLLM with "
            "--logprobs-mode processed_logprobs"
        )
    edges = [0, *(span.end for span in spans)]
    starts = [span.start for span in spans]
    if starts != edges[:-1] or edges[-1] != len(token_ids) or any(s.end <= s.start for s in spans):
        raise EngineError(f"policy versions {spans} do not cover {len(token_ids)} tokens")
    return Sampled(token_ids, known, finish_reason, spans)


def version_number(version: str | None) -> int:
    """A policy version; -1 for what was never given by a trainer."""
    return int(version) if version is not None and version.isdecimal() else NONE_YET
