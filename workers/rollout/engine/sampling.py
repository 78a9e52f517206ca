"""One turn asked for: how it is to be sampled, who samples it, and what a failure says of the episode."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from stream.errors import EngineError, EngineRefusedError
from stream.records import Failure
from stream.validity import RolloutReason, TruncationReason
from workers.engine.wire import SamplingParams
from workers.rollout.engine.answer import Sampled

_TOO_LONG = "maximum context length"
"""In these words vLLM, and what speaks like it, refuses a context."""


class Sampling(Struct, frozen=True, kw_only=True):
    """How to sample one turn."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def on_the_wire(self, alternatives: int = 0) -> SamplingParams:
        """The same in vLLM's words, with log-probs of the sampled tokens and of so many `alternatives`."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            logprobs=alternatives,
            stop_token_ids=list(self.stop_token_ids),
            seed=self.seed,
        )


class Sampler(Protocol):
    """Who samples tokens: the engine's client."""

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, *, at_least: int = 0) -> Sampled:
        """Sample a turn.

        Args:
            prompt_ids: all tokens so far.
            sampling: temperature, limits, stop tokens.
            at_least: a policy version; an engine that is older is not asked.

        Raises:
            EngineRefusedError: a fact about this request.
            EngineError: this request fails while others succeed.
            EngineUnavailableError: nothing answers.
        """


def turn_seed(episode_seed: int, turn: int) -> int:
    """The seed of an episode's turn, from 0: within the 63 bits that engines take, and no other episode's."""
    return (episode_seed + (turn << 40)) % 2**63


def ending_of(error: EngineError, turns: int) -> Failure | TruncationReason:
    """What it means for an episode that a turn could not be sampled, while others can be.

    Args:
        error: why not.
        turns: of the model, before.
    """
    if not isinstance(error, EngineRefusedError) or _TOO_LONG not in str(error):
        return Failure(reason=RolloutReason.ENGINE, detail=str(error))
    if turns:
        return TruncationReason.CONTEXT
    return Failure(reason=RolloutReason.PROMPT_TOO_LONG, detail=str(error))
