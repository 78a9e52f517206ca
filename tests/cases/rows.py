"""Rows of one turn or of several."""

from array import array
from collections.abc import Sequence

from stream.records import Row, Span


def sampled_row(
    tokens: Sequence[int], logprobs: Sequence[float], *, version: int = 0, prompt: Sequence[int] = (1, 2)
) -> Row:
    """Return a row whose tokens were all sampled by one policy version."""
    return _row(tokens, [(0, len(tokens))], logprobs, version, prompt)


def episode_row(tokens: Sequence[int], logprobs: Sequence[float], *, version: int = 0) -> Row:
    """Return a row in which each run of tokens other than 0 is a turn; `logprobs` are repeated as often as needed."""
    ends = [place for place, token in enumerate([*tokens, 0]) if not token]
    starts = [0, *(end + 1 for end in ends)]
    turns = [(start, end) for start, end in zip(starts, ends, strict=False) if start < end]
    count = sum(end - start for start, end in turns)
    return _row(tokens, turns, [logprobs[i % len(logprobs)] for i in range(count)], version, (1, 2))


def _row(
    tokens: Sequence[int],
    turns: list[tuple[int, int]],
    logprobs: Sequence[float],
    version: int,
    prompt: Sequence[int],
) -> Row:
    return Row(
        prompt_ids=array("i", prompt).tobytes(),
        token_ids=array("i", tokens).tobytes(),
        sampled_ranges=turns,
        logprobs=array("f", logprobs).tobytes(),
        spans=[Span(version, start, end) for start, end in turns],
    )
