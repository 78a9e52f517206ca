"""Cases: lists of completions, and the batches made from them.

Everything about a completion (tokens, log-probs, parts, rewards of turns) follows from its key, so that completions can
be reordered, added, split into rows and removed.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from hypothesis import strategies as st
from torch import Tensor

from stream.validity import DropReason, RewardReason, RolloutReason, TruncationReason
from workers.train.algorithms.masks import (
    DROP_REASONS,
    NONE,
    REWARD_REASONS,
    ROLLOUT_REASONS,
    TRUNCATION_REASONS,
    CompletionFacts,
)
from workers.train.step.batch import Batch
from workers.train.step.branches import BranchFacts

VOCABULARY = 11
VERSION = 3
"""The policy version that is trained; with `pacing.max_token_age = MAX_AGE`, version 0 is too old."""
MAX_AGE = 2
JUNK = (float("nan"), float("inf"), float("-inf"), 1e30)
REWARDS = (0.0, 1.0, 0.5, -2.0, 0.875, 8.0)
"""Multiples of an eighth, so that small sums are exact."""
TRUNCATED = ("length", "context", "max_turns", "tool_calls", "tool_errors")
INVALID = ("unmeasured", "failed", "dropped", "no_row")
PROMPT = 2


@dataclass(frozen=True)
class Made:
    """A completion of a case."""

    key: int
    group: int
    reward: float
    state: str = "ok"
    """`ok`, one of `INVALID`, or the reason for its truncation."""
    turns: tuple[int, ...] = (3,)
    """Number of sampled tokens in each turn."""
    gap: int = 0
    """Number of tool tokens between two turns."""
    forked: bool = False
    """Each turn has its own row, behind all earlier tokens; otherwise one row holds all turns."""
    stale: tuple[int, ...] = ()
    """Numbers of the sampled tokens that come from a policy that is too old."""
    tail: int = 0
    """Number of tool tokens behind the last sampled token."""
    absent: tuple[int, ...] = ()
    """Turns without a row; for forked completions only."""

    @property
    def truncated(self) -> TruncationReason | None:
        return TruncationReason(self.state) if self.state in TRUNCATED else None

    def voting(self, policy: Callable[[TruncationReason], str]) -> bool:
        """Whether the completion's state puts it in B, before any rejection."""
        return self.used(policy) and (self.truncated is None or policy(self.truncated) != "zero_reward")

    def used(self, policy: Callable[[TruncationReason], str]) -> bool:
        """Whether the completion's state puts it in B or L, before any rejection."""
        return self.state not in INVALID and (self.truncated is None or policy(self.truncated) != "exclude")


completions = st.builds(
    Made,
    key=st.integers(0, 10**6),
    group=st.integers(0, 3),
    reward=st.sampled_from(REWARDS),
    state=st.sampled_from(("ok", "ok", "ok", *TRUNCATED, *INVALID)),
    turns=st.sampled_from([(3,), (1,), (4,), (2, 2), (1, 3)]),
    gap=st.integers(0, 1),
    forked=st.booleans(),
    stale=st.sampled_from([(), (), (), (0,), (1,), (0, 1)]),
)
cases = st.lists(completions, min_size=1, max_size=9, unique_by=lambda made: made.key)


@dataclass(frozen=True)
class MadeRow:
    completion: int
    part: int
    tokens: list[int]
    sampled: list[int]
    """Positions of the sampled tokens in the row."""
    numbers: list[int]
    """For each of these positions, the token's number among the completion's sampled tokens."""


def rows_of(case: Sequence[Made]) -> list[MadeRow]:
    """Return the rows of a case in order; some may hold no sampled token."""
    return [row for c, made in enumerate(case) if made.state != "no_row" for row in _rows(c, made)]


def _rows(c: int, made: Made) -> list[MadeRow]:
    source = random.Random(made.key)
    tokens: list[tuple[int, int | None]] = [(source.randrange(VOCABULARY), None) for _ in range(PROMPT)]
    ends, number = [], 0
    for turn, length in enumerate(made.turns):
        tokens += [(source.randrange(VOCABULARY), None) for _ in range(made.gap if turn else 0)]
        tokens += [(source.randrange(VOCABULARY), number + i) for i in range(length)]
        number += length
        ends.append(len(tokens))
    if not made.forked:
        return [_row(c, 0, tokens, 0, made.tail)]
    starts = [0, *ends[:-1]]
    return [
        _row(c, part, tokens[:end], start, made.tail)
        for part, (start, end) in enumerate(zip(starts, ends, strict=True))
        if part not in made.absent
    ]


def _row(c: int, part: int, tokens: list[tuple[int, int | None]], start: int, tail: int) -> MadeRow:
    """Return the row in which the tokens sampled from position `start` on bear loss."""
    own = [(place, number) for place, (_, number) in enumerate(tokens) if place >= start and number is not None]
    return MadeRow(c, part, [token for token, _ in tokens] + [1] * tail, [p for p, _ in own], [n for _, n in own])


def build(
    case: Sequence[Made], *, width: int = 0, codes: Mapping[int, int] | None = None, rows: list[MadeRow] | None = None
) -> Batch:
    """Return the batch of a case.

    Args:
        case: the completions.
        width: extra columns of padding.
        codes: code of each group; its own number by default.
        rows: the rows in another order than the completions'.
    """
    rows = rows_of(case) if rows is None else rows
    codes = codes or {number: number for number in range(10)}
    groups = max((codes[made.group] for made in case), default=-1) + 1
    wide = max((len(row.tokens) for row in rows), default=0) + width
    known = [made.state != "unmeasured" for made in case]
    facts = CompletionFacts(
        group_ids_C=torch.tensor([codes[made.group] for made in case], dtype=torch.int64),
        num_groups=groups,
        rewards_C=_floats([made.reward if known[c] else 0.0 for c, made in enumerate(case)]),
        measured_C=torch.tensor(known, dtype=torch.bool),
        reward_reason_C=_codes(case, "unmeasured", REWARD_REASONS.index(RewardReason.RAISED)),
        rollout_reason_C=_codes(case, "failed", ROLLOUT_REASONS.index(RolloutReason.ENGINE)),
        truncation_reason_C=torch.tensor(
            [TRUNCATION_REASONS.index(m.truncated) if m.truncated else NONE for m in case]
        ).long(),
        drop_reason_C=_codes(case, "dropped", DROP_REASONS.index(DropReason.NO_VALID_ROW)),
        turns_C=torch.tensor([len(made.turns) for made in case], dtype=torch.int64),
    )
    parts = [[drawn(made.key, "part", name) for made in case] for name in range(2)]
    greedy = dict.fromkeys(range(groups), 0)
    greedy |= {code: label for label, code in codes.items() if code < groups}
    turn_rewards = [_turn_rewards(case[row.completion], row) for row in rows]
    return Batch(
        tokens_RT=_sheet(wide, [row.tokens for row in rows]).long(),
        sampled_RT=_placed(wide, rows, lambda _made, _n: 1.0) == 1,
        rollout_logprobs_RT=_placed(wide, rows, lambda made, n: -3 * drawn(made.key, "log-prob", n), case),
        versions_RT=_placed(wide, rows, lambda made, n: 1 + (0 if n in made.stale else 1 + made.key % 3), case).int()
        - 1,
        lengths_R=torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64),
        completion_ids_R=torch.tensor([row.completion for row in rows], dtype=torch.int64),
        facts=facts,
        branches=BranchFacts.unbranched(len(rows), len(case)),
        prompt_ids=tuple(str(code) for code in range(groups)),
        greedy_rewards_G=_floats([drawn(greedy[code], "greedy", 0) for code in range(groups)]),
        greedy_measured_G=torch.ones(groups, dtype=torch.bool),
        greedy_lengths_G=torch.full((groups,), 3),
        greedy_truncated_G=torch.full((groups,), NONE),
        part_keys=(("env", 1.0), ("style", 0.5)),
        parts_PC=torch.where(facts.measured_C, _floats(parts).view(2, len(case)), 0.0),
        has_part_PC=facts.measured_C.expand(2, len(case)),
        part_weights_P=_floats([1.0, 0.5]),
        turn_rewards_RT=_sheet(wide, turn_rewards).double(),
    )


def drawn(key: int, what: str, number: int) -> float:
    """Return a fixed number in [0, 1), a multiple of 1/256, for these arguments."""
    return blake2b(f"{key} {what} {number}".encode(), digest_size=1).digest()[0] / 256


def _turn_rewards(made: Made, row: MadeRow) -> list[float]:
    """Put 0, 1/8 or 2/8 on the last token of each turn if the reward is measured and there are several turns."""
    result = [0.0] * len(row.tokens)
    ends = {sum(made.turns[: turn + 1]) - 1: turn for turn in range(len(made.turns))}
    if len(made.turns) > 1 and made.state != "unmeasured":
        for place, number in zip(row.sampled, row.numbers, strict=True):
            if number in ends:
                result[place] = round(2 * drawn(made.key, "turn", ends[number])) / 8
    return result


def _placed(
    width: int, rows: Sequence[MadeRow], value: Callable[[Made, int], float], case: Sequence[Made] = ()
) -> Tensor:
    """Return a value for each sampled token, from its completion and its number; 0 elsewhere."""
    lines = []
    for row in rows:
        line = [0.0] * len(row.tokens)
        for place, number in zip(row.sampled, row.numbers, strict=True):
            line[place] = value(case[row.completion] if case else Made(0, 0, 0.0), number)
        lines.append(line)
    return _sheet(width, lines)


def _sheet(width: int, lines: Sequence[Sequence[float]]) -> Tensor:
    return _floats([[*line, *[0.0] * (width - len(line))] for line in lines]).view(len(lines), width)


def _floats(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _codes(case: Sequence[Made], state: str, code: int) -> Tensor:
    return torch.tensor([code if made.state == state else NONE for made in case], dtype=torch.int64)


def interleaved(case: Sequence[Made], source: random.Random) -> list[MadeRow]:
    """Return the rows shuffled; rows of one completion stay in order, which is the order of time."""
    rows = rows_of(case)
    owners = [row.completion for row in rows]
    source.shuffle(owners)
    own = {c: iter([row for row in rows if row.completion == c]) for c in set(owners)}
    return [next(own[c]) for c in owners]


def fresh(others: Sequence[Made], state: str | None = None) -> list[Made]:
    """Return the same completions under keys that no case uses."""
    return [replace(made, key=made.key + 10**7, state=state or made.state) for made in others]
