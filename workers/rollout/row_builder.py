"""Rows while they grow: what the model saw and sampled, turn by turn, in typed arrays."""

import math
from array import array
from collections.abc import Sequence

from stream.errors import EngineError
from stream.records import Row, Span
from workers.rollout.engine_client.sampled_turn import SampledTurn


class RowBuilder:
    """The tokens of one conversation.

    Example, after `Draft([1, 2])`, three sampled tokens, two of a tool, and two sampled ones::

        context()  [1 2  a a a  t t  a a]
        row()      prompt_ids [1 2], token_ids [a a a t t a a], sampled [(0, 3), (5, 7)], five log-probs
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt = array("i", prompt_ids)
        self._tokens = array("i")
        self._logprobs = array("f")
        self._sampled: list[tuple[int, int]] = []
        self._spans: list[Span] = []

    def __len__(self) -> int:
        """Tokens after the prompt."""
        return len(self._tokens)

    def context(self) -> list[int]:
        """All that the model has seen, and said, so far."""
        return (self._prompt + self._tokens).tolist()

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not sample."""
        self._tokens.extend(ids)

    def append_sample(self, sampled: SampledTurn) -> None:
        """Append what the engine sampled.

        Raises:
            EngineError: not one finite log-prob for each token, or tokens without a policy version. Nothing is added.
        """
        count = len(sampled.token_ids)
        if len(sampled.logprobs) != count:
            raise EngineError(f"the engine sent {len(sampled.logprobs)} log-probs for {count} sampled tokens")
        if not math.isfinite(sum(sampled.logprobs)):  # a sum of finite log-probs is finite
            raise EngineError("the engine sent a log-prob that is not finite")
        end = 0
        for span in sampled.spans:
            if span.start != end or span.end <= span.start:
                raise EngineError(f"the engine's policy versions leave gaps or overlap: {sampled.spans}")
            end = span.end
        if end != count:
            raise EngineError(f"the engine's policy versions cover {end} of {count} sampled tokens")
        if not count:
            return
        start = len(self._tokens)
        self._tokens.extend(sampled.token_ids)
        self._logprobs.extend(sampled.logprobs)
        self._sampled.append((start, start + count))
        self._spans += [Span(span.version, start + span.start, start + span.end) for span in sampled.spans]

    def row(self) -> Row | None:
        """The row up to its last sampled token; None where nothing was sampled."""
        if not self._sampled:
            return None
        return Row(
            prompt_ids=self._prompt.tobytes(),
            token_ids=self._tokens[: self._sampled[-1][1]].tobytes(),
            sampled_ranges=self._sampled,
            logprobs=self._logprobs.tobytes(),
            spans=self._spans,
        )


class MultiRowBuilder:
    """The rows of one completion: one, until a template rewrites what stands in it.

    Example, after `Drafts([1, 2])`, a turn `[a a]`, `show([1, 2, a, a, t], 1)`, a turn `[b]`, `show([9, b, t], 1)`::

        context()  [9 b t]          the model no longer sees the rest
        rows()     [1 2 | a a t b]  and, once something is sampled there, [9 b t | ...]
        used       5                a a t b t
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self._finished: list[Row] = []
        self._current = RowBuilder(prompt_ids)
        self.token_count = 0
        """Tokens of the completion so far: those sampled, and those that answered them."""

    def context(self) -> list[int]:
        """All that the model sees now."""
        return self._current.context()

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not sample."""
        self._current.append_context(ids)
        self.token_count += len(ids)

    def set_context(self, ids: Sequence[int], new_count: int) -> None:
        """Let the model see this from now on: in the same row if that goes on with what it has seen, else in a new one.

        Args:
            ids: the whole context.
            new_count: how many of them, at the end, are no repetition.
        """
        seen = self._current.context()
        if list(ids[: len(seen)]) == seen:
            self._current.append_context(ids[len(seen) :])
        else:
            self._finished += [row] if (row := self._current.row()) is not None else []
            self._current = RowBuilder(ids)
        self.token_count += new_count

    def append_sample(self, sampled: SampledTurn) -> None:
        """Append what the engine sampled, and believe nothing of it unseen: see `RowBuilder.append_sample`."""
        self._current.append_sample(sampled)
        self.token_count += len(sampled.token_ids)

    def rows(self) -> list[Row]:
        """Every sampled token in exactly one of them, in the order of the turns."""
        last = self._current.row()
        return self._finished if last is None else [*self._finished, last]
