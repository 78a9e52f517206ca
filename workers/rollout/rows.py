"""Rows under construction: the tokens that the model saw and sampled, turn by turn, in typed arrays."""

from array import array
from collections.abc import Sequence

from stream.records import Row, Span
from workers.rollout.engine_client.sampling import SampledTurn
from workers.rollout.token_ids import TokenIds


class RowBuilder:
    """The tokens of one conversation.

    Example, after `RowBuilder([1, 2])`, three sampled tokens, two of a tool result, and two sampled ones::

        context()  [1 2  a a a  t t  a a]
        row()      prompt_ids [1 2], token_ids [a a a t t a a], sampled_ranges [(0, 3), (5, 7)], five log-probs
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        """Start a row; `TokenIds` are its own from now on."""
        self._ids = prompt_ids if isinstance(prompt_ids, TokenIds) else TokenIds(prompt_ids)
        self._prompt_length = len(prompt_ids)
        self._logprobs = array("f")
        self._sampled: list[tuple[int, int]] = []
        self._spans: list[Span] = []

    def __len__(self) -> int:
        """Return the number of tokens after the prompt."""
        return len(self._ids) - self._prompt_length

    def context(self) -> TokenIds:
        """Return all tokens so far, the prompt first. They grow with the row."""
        return self._ids

    def copy(self) -> "RowBuilder":
        """Return a copy, which grows on its own."""
        copied = RowBuilder(self._ids.copy())
        copied._prompt_length = self._prompt_length
        copied._logprobs, copied._sampled, copied._spans = self._logprobs[:], self._sampled[:], self._spans[:]
        return copied

    def versions(self) -> set[int]:
        """Return the policy versions that sampled tokens."""
        return {span.version for span in self._spans}

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not sample."""
        self._ids.extend(ids)

    def append_sample(self, sampled: SampledTurn) -> None:
        """Append a sampled turn."""
        count = len(sampled.token_ids)
        if not count:
            return
        start = len(self)
        self._ids.extend(sampled.token_ids)
        self._logprobs.fromlist(sampled.logprobs)  # half the time of `extend`, which takes any iterable
        self._sampled.append((start, start + count))
        self._spans += [Span(span.version, start + span.start, start + span.end) for span in sampled.spans]

    def row(self) -> Row | None:
        """Return the row up to its last sampled token; None if nothing was sampled."""
        if not self._sampled:
            return None
        prompt = self._prompt_length
        return Row(
            prompt_ids=self._ids.tobytes(0, prompt),
            token_ids=self._ids.tobytes(prompt, prompt + self._sampled[-1][1]),
            sampled_ranges=self._sampled,
            logprobs=self._logprobs.tobytes(),
            spans=self._spans,
        )


class MultiRowBuilder:
    """The rows of one completion: one, until the chat template rewrites earlier tokens.

    Example, after `MultiRowBuilder([1, 2])`, a turn `[a a]`, `set_context([1, 2, a, a, t], 1)`, a turn `[b]`, and
    `set_context([9, b, t], 1)`::

        context()    [9 b t]          the model no longer sees the rest
        rows()       [1 2 | a a t b]  and, after the next sampled turn, [9 b t | ...]
        token_count  5                a a t b t
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self._finished: list[Row] = []
        self._current = RowBuilder(prompt_ids)
        self.token_count = 0
        """Tokens of the completion so far: sampled ones and tool results, each counted once."""

    def context(self) -> TokenIds:
        """Return all tokens that the model sees now. They grow with the row."""
        return self._current.context()

    def versions(self) -> set[int]:
        """Return the policy versions that sampled tokens."""
        finished = {span.version for row in self._finished for span in row.spans}
        return finished | self._current.versions()

    def append_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not sample."""
        self._current.append_context(ids)
        self.token_count += len(ids)

    def set_context(self, ids: TokenIds, new_count: int) -> None:
        """Replace what the model sees: extends the current row if `ids` starts with its tokens, otherwise starts a row.

        The row may keep `ids`, and lets them grow.

        Args:
            ids: the whole context.
            new_count: how many of them, at the end, the completion did not contain before.
        """
        seen = self._current.context()
        if seen.is_prefix_of(ids):
            self._current.append_context(ids[len(seen) :])
        else:
            self._finished += [row] if (row := self._current.row()) is not None else []
            self._current = RowBuilder(ids)
        self.token_count += new_count

    def append_sample(self, sampled: SampledTurn) -> None:
        """Append a sampled turn."""
        self._current.append_sample(sampled)
        self.token_count += len(sampled.token_ids)

    def rows(self) -> list[Row]:
        """Return the rows in the order of their turns; each sampled token is in exactly one of them."""
        last = self._current.row()
        return self._finished if last is None else [*self._finished, last]
