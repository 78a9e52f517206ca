"""A way to ask an engine for tokens: how a request is written, and how its answer is read."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Protocol

from workers.rollout.engine_client.sampled_turn import SampledTurn
from workers.rollout.engine_client.sampling import SamplingOptions


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """What an engine is asked for."""

    prompt_ids: Sequence[int]
    """The whole context."""
    sampling: SamplingOptions
    _: KW_ONLY
    model: str
    """The name that the engine serves it under."""
    top_logprobs: int = 0
    """So many of the likeliest tokens are to come with their log-probs, besides the sampled one."""
    request_id: str = ""
    """Of the request; empty: the engine finds one."""
    cache_salt: str = ""
    """Only requests with the same one share cached prefixes."""


class SamplingApi(Protocol):
    """One HTTP route of an engine that takes token ids and gives token ids with log-probs."""

    path: ClassVar[str]

    def encode(self, request: SamplingRequest) -> bytes:
        """Write a request."""

    def decode(self, status: int, payload: bytes, url: str, *, version: int) -> SampledTurn:
        """Read the answer, and believe nothing of it unseen.

        Args:
            status: of HTTP.
            payload: of the answer.
            url: of the engine, for messages.
            version: of all tokens, where the answer itself does not say; the older of those before and after.

        Raises:
            EngineRefusedError: a 4xx other than 408 and 429.
            EngineError: everything else that is no sample: an error, junk, an abort, no tokens, tokens without a finite
                log-prob or without a policy version.
        """

    def reports_versions(self, payload: bytes, /) -> bool:
        """Whether this answer names the policy version of every token; else the engine is asked before and after."""

    def first_top_logprobs(self, payload: bytes) -> list[float]:
        """The log-probs of the likeliest first tokens, highest first, of an answer that was asked for alternatives.

        Raises:
            EngineError: it has none.
        """
