"""Completions of agents whose conversation branches, and the same ones without their discarded rows."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from stream.records import Branch, BranchRole, Completion, DiscardReason, Group, Prompt, Row
from stream.validity import Measured
from tests.cases.completions import REWARDS, VERSION, VOCABULARY, Made
from tests.cases.path import Result, evaluate
from tests.cases.rows import sampled_row
from workers.settings import Settings
from workers.train.step.batch import Batch, collate


@dataclass(frozen=True)
class Line:
    """A branch of a case."""

    role: BranchRole = BranchRole.MAIN
    rows: tuple[int, ...] = (3,)
    """Sampled tokens of each row."""
    discarded: DiscardReason | None = None


@dataclass(frozen=True)
class Tree:
    """A completion of a case; its tokens follow from its key and the numbers of branch and row."""

    key: int
    lines: tuple[Line, ...]
    reward: float = 1.0
    group: int = 0
    shuffled: bool = False
    """Rows of the branches alternate, as those of sub-agents that work at the same time."""
    unusable: bool = False
    """Tokens of discarded rows have no usable log-prob and come from a policy that is too old."""

    def without_discarded(self) -> list[tuple[int, Line]]:
        """Return the branches that are trained, with their numbers."""
        return [(number, line) for number, line in enumerate(self.lines) if line.discarded is None]


lines = st.builds(
    Line,
    role=st.sampled_from([BranchRole.MAIN, BranchRole.MAIN, *BranchRole]),
    rows=st.sampled_from([(3,), (1,), (2, 1), (1, 4)]),
    discarded=st.sampled_from([None, None, None, *DiscardReason]),
)
trees = st.lists(
    st.builds(
        Tree,
        key=st.integers(0, 10**6),
        lines=st.lists(lines, max_size=4).map(tuple),
        reward=st.sampled_from(REWARDS),
        group=st.integers(0, 1),
        shuffled=st.booleans(),
        unusable=st.booleans(),
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda tree: tree.key,
)


def record(index: int, tree: Tree, *, discarded: bool = True, branched: bool = True) -> Completion:
    """Return the completion of a tree.

    Args:
        index: within its group.
        tree: the tree.
        discarded: False leaves out rows and branches that are discarded, as if they had never been.
        branched: False leaves out the branches, and keeps their rows.
    """
    kept = [*enumerate(tree.lines)] if discarded else tree.without_discarded()
    found = [(n, part, _row(tree, n, part)) for n, line in kept for part in range(len(line.rows))]
    if tree.shuffled:
        found.sort(key=lambda item: (item[1], item[0]))
    rows_of = {n: tuple(at for at, (number, _, _) in enumerate(found) if number == n) for n, _ in kept}
    branches = [Branch(role=line.role, rows=rows_of[n], discarded=line.discarded) for n, line in kept]
    return Completion(
        index=index,
        rows=[row for *_, row in found],
        branches=branches if branched else [],
        reward=Measured(tree.reward),
        turns=len(found),
    )


def _row(tree: Tree, number: int, part: int) -> Row:
    source, line = random.Random(f"{tree.key} {number} {part}"), tree.lines[number]
    prompt = [source.randrange(VOCABULARY) for _ in range(2 + part)]
    tokens = [source.randrange(VOCABULARY) for _ in range(line.rows[part])]
    broken = tree.unusable and line.discarded is not None
    logprobs = [math.nan if broken else -source.uniform(1, 3) for _ in tokens]
    return sampled_row(tokens, logprobs, version=0 if broken else VERSION, prompt=prompt)


def in_rows(index: int, reward: float, tokens: Sequence[int], cuts: Sequence[int], **facts: Any) -> Completion:
    """Return a completion whose sampled tokens are cut into rows, each behind all tokens before it.

    Args:
        index: within its group.
        reward: measured.
        tokens: all sampled tokens.
        cuts: where rows begin, from 0, and the number of tokens.
        facts: other fields of the record.
    """
    logprobs = [-1.0 - place % 7 / 4 for place in range(len(tokens))]
    rows = [
        sampled_row(tokens[start:end], logprobs[start:end], version=VERSION, prompt=[1, 2, *tokens[:start]])
        for start, end in pairwise(cuts)
    ]
    return Completion(index=index, rows=rows, reward=Measured(reward), turns=len(rows), **facts)


def batch_of(completions: Sequence[tuple[int, Completion]]) -> Batch:
    """Return the batch of completions, each given with the number of its group, with log-probs in float64."""
    groups = [
        Group(prompt=Prompt(id=str(number), messages=[]), completions=[c for n, c in completions if n == number])
        for number in sorted({number for number, _ in completions})
    ]
    batch = collate(groups)
    return replace(batch, rollout_logprobs_RT=batch.rollout_logprobs_RT.double())


def compute(completions: Sequence[tuple[int, Completion]], settings: Settings, *, alone: bool = False) -> Result:
    """Compute the learner's path of completions, given in the order of their groups.

    Args:
        completions: each with the number of its group.
        settings: of the run.
        alone: each completion is a micro-batch of its own.
    """
    batch = batch_of(completions)

    def split(rows: Tensor) -> list[Tensor]:
        owners = batch.completion_ids_R[rows]
        return [rows[owners == owner] for owner in owners.unique()]

    case = [Made(place, number, 0.0) for place, (number, _) in enumerate(completions)]
    return evaluate(case, batch, settings, split=split if alone else None)


def records(case: Sequence[Tree], **how: bool) -> list[tuple[int, Completion]]:
    """Return the completions of a case in the order of their groups; `how` is as for `record`."""
    return [(tree.group, record(i, tree, **how)) for i, tree in enumerate(sorted(case, key=lambda tree: tree.group))]
