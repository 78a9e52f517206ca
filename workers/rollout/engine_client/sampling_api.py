"""How a request for tokens is written to an engine, and how its answer is read."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec
from msgspec import Struct

from workers.rollout.engine_client.sampled_turn import SampledTurn
from workers.rollout.engine_client.sampling import SamplingOptions
from workers.rollout.token_ids import TokenIds


class SamplingRequest(Struct, frozen=True):
    """One request for tokens."""

    prompt_ids: Sequence[int]
    """The whole context."""
    options: SamplingOptions
    model: str
    """Name that the engine serves the model or adapter under."""
    top_logprobs: int = 0
    """Number of most likely tokens to report with their log-probs, besides the sampled one."""
    request_id: str = ""
    """Empty: the engine makes one."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""


def ids_json(ids: Sequence[int]) -> msgspec.Raw:
    """Return token ids as JSON, which `TokenIds` have already: a context may have 128,000."""
    return msgspec.Raw(ids.json if isinstance(ids, TokenIds) else msgspec.json.encode(list(ids)))


class SamplingApi(Protocol):
    """One HTTP route of an engine: token ids in, token ids with log-probs out."""

    path: ClassVar[str]

    def encode(self, request: SamplingRequest) -> bytes:
        """Write the body of a request."""

    def decode(self, status: int, payload: bytes, url: str, *, version: int) -> SampledTurn:
        """Read and validate an answer.

        Args:
            status: HTTP status.
            payload: body of the answer.
            url: base URL of the engine, for messages.
            version: policy version of all tokens if the answer names none: the older of those before and after it.

        Raises:
            EngineRefusedError: a 4xx other than 408 and 429.
            EngineError: anything else that is not a valid sample: another status, a malformed body, an abort, no
                tokens, or tokens without a finite log-prob or a policy version.
        """

    def reports_versions(self, payload: bytes, /) -> bool:
        """Whether this answer names the policy version of every token."""

    def first_top_logprobs(self, payload: bytes) -> list[float]:
        """Return the log-probs of the most likely first tokens, highest first; empty if the answer has none."""
