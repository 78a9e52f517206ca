"""Rows in which every token was sampled."""

from array import array
from collections.abc import Sequence

from stream.records import Row, Span


def sampled_row(
    tokens: Sequence[int], logprobs: Sequence[float], *, version: int = 0, prompt: Sequence[int] = (1, 2)
) -> Row:
    """Return a row whose tokens were all sampled by one policy version."""
    return Row(
        prompt_ids=array("i", prompt).tobytes(),
        token_ids=array("i", tokens).tobytes(),
        sampled_ranges=[(0, len(tokens))],
        logprobs=array("f", logprobs).tobytes(),
        spans=[Span(version, 0, len(tokens))],
    )
