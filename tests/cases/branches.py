<<<<<<< HEAD
"""Completions of agents whose conversation branches."""

from array import array

from stream.records import Branch, BranchRole, Completion, DiscardReason, Message, TrainedCompletion, TrainedRow
from stream.validity import Measured, TruncationReason
from tests.cases.rows import episode_row


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def agent_completion(index: int = 0, **fields: object) -> Completion:
    """Return a completion with a sub-agent, a title beside the task, and a summary with which it goes on.

    The sub-agent was asked twice for the same turn. The first branch has two rows: the template has rewritten one.
    """
    messages = [
        said("assistant", "I ask two others."),  # main 1, turn 1; the prompt stands before it
        said("user", "Name this task."),
        said("assistant", "Two birds"),  # side
        said("user", "You look for birds. Look in the north."),
        said("assistant", "I go north."),  # sub search 1, turn 1
        said("user", "Go on."),
        said("assistant", "I rest."),  # sub search 2, an answer that nothing follows
        said("user", "Go on."),
        said("assistant", "A crane."),  # sub search 1, turn 2
        said("tool", "north: a crane"),
        said("assistant", "One more look."),  # main 1, turn 2
        said("user", "Summarize."),
        said("assistant", "A crane in the north."),  # compact
        said("user", "So far: a crane in the north."),
        said("assistant", "Answer: a crane."),  # main 2
    ]
    branches = [
        Branch(role=BranchRole.MAIN, turns=2, rows=(0, 1), rewritten=("template",), answers=(0, 10)),
        Branch(role=BranchRole.SIDE, turns=1, rows=(2,), discarded=DiscardReason.ROLE, answers=(2,)),
        Branch(role=BranchRole.SUB, name="search", turns=2, rows=(3,), parent=0, answers=(4, 8)),
        Branch(
            role=BranchRole.SUB,
            name="search",
            turns=1,
            rows=(4,),
            parent=2,
            after_turn=1,
            limited=TruncationReason.LENGTH,
            discarded=DiscardReason.SUPERSEDED,
            answers=(6,),
        ),
        Branch(role=BranchRole.COMPACT, turns=1, rows=(5,), parent=0, after_turn=2, answers=(12,)),
        Branch(role=BranchRole.MAIN, turns=1, rows=(6,), parent=4, answers=(14,)),
    ]
    facts: dict[str, object] = {
        "rows": [episode_row([7 + at for at in range(count)], (-0.5,), version=3) for count in (4, 3, 2, 5, 1, 6, 8)],
        "branches": branches,
        "prompt_messages": [said("user", "Which birds are there?")],
        "messages": messages,
        "turns": 8,
        "reward": Measured(1.0),
    }
    return Completion(index=index, **(facts | fields))  # type: ignore[arg-type]


def trained_agent() -> TrainedCompletion:
    """Return what a step did with it: a rule took one token out of the first sub-agent's row."""
    shares = array("f", [0.5]).tobytes()
    masks = (b"", b"", bytes(2), b"\1\1\0\1\1", bytes(1), b"", b"")
    rows = tuple(TrainedRow(loss_mask=mask, advantages=shares if any(mask) or not mask else b"") for mask in masks)
    return TrainedCompletion("valid", 0.5, 25, rows)
=======
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
>>>>>>> h2
