"""One turn asked for: how it is to be sampled, who samples it, and what a failure says of the episode."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct, structs

from stream.errors import EngineError, EngineRefusedError
from stream.records import Failure
from stream.validity import RolloutReason, TruncationReason
from workers.engine_api.wire import SamplingParams
from workers.rollout.engine_client.sampled_turn import SampledTurn
from workers.settings import Rollout

_TOO_LONG_MESSAGES = ("maximum context length", "maximum model length")
"""In these words vLLM's routes, and what speaks like them, refuse a context."""


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
    """Whose turn it is: completions of a group begin alike, so one engine may have all of them in its cache; empty:
    nobody's."""
    completion: int = 0
    """Index within the group; the turns of a completion begin alike."""

    @classmethod
    def from_settings(
        cls,
        limits: Rollout,
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...] = (),
        seed: int | None = None,
        group: str = "",
        completion: int = 0,
    ) -> "SamplingOptions":
        """As a run's settings have it."""
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
        )

    @property
    def matches_raw_logits(self) -> bool:
        """Whether log-probs of the raw logits are those of the distribution that is sampled from."""
        steered = self.min_tokens or self.logit_bias
        cut = self.top_p < 1 or self.top_k or self.min_p
        return not steered and (self.temperature == 0 or (self.temperature == 1 and not cut))

    @property
    def description(self) -> str:
        """What differs from the defaults, for messages."""
        plain = structs.asdict(SamplingOptions(temperature=math.nan, max_tokens=0))
        return ", ".join(f"{key} {value}" for key, value in structs.asdict(self).items() if value != plain[key])

    def capped(self, max_tokens: int) -> "SamplingOptions":
        """The same with at most so many tokens, of which one at least."""
        return structs.replace(self, max_tokens=max_tokens) if 0 < max_tokens < self.max_tokens else self

    def to_wire(self, top_logprobs: int = 0) -> SamplingParams:
        """The same in vLLM's words, with log-probs of the sampled tokens and of so many `alternatives`."""
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
    """Who samples tokens: the engine's client."""

    async def sample(
        self, prompt_ids: Sequence[int], sampling: SamplingOptions, *, min_policy_version: int = 0
    ) -> SampledTurn:
        """Sample a turn.

        Args:
            prompt_ids: all tokens so far.
            sampling: temperature, limits, stop tokens.
            min_policy_version: a policy version; an engine that is older is not asked.

        Raises:
            EngineRefusedError: a fact about this request.
            EngineError: this request fails while others succeed.
            EngineUnavailableError: nothing answers.
        """


def turn_seed(episode_seed: int, turn: int) -> int:
    """The seed of an episode's turn, from 0: within the 63 bits that engines take, and different in its lowest 32.

    torch's generator on a CPU heeds no others: seeds that differ above alone give the same numbers.
    """
    digest = hashlib.blake2b(f"{episode_seed}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def end_after_error(error: EngineError, turns: int) -> Failure | TruncationReason:
    """What it means for an episode that a turn could not be sampled, while others can be.

    Args:
        error: why not.
        turns: of the model, before.
    """
    if not isinstance(error, EngineRefusedError) or not any(words in str(error) for words in _TOO_LONG_MESSAGES):
        return Failure(reason=RolloutReason.ENGINE, detail=str(error))
    if turns:
        return TruncationReason.CONTEXT
    return Failure(reason=RolloutReason.PROMPT_TOO_LONG, detail=str(error))
