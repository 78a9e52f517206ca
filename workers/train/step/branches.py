"""Branches of agents' conversations in a batch: which rows bear no loss, and what each branch has of the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from stream.records import Branch, BranchRole, Completion, DiscardReason
from workers.train.algorithms.masks import NONE

BRANCH_ROLES: Final = tuple(BranchRole)
DISCARD_REASONS: Final = tuple(DiscardReason)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BranchFacts:
    """Which branch each row is of, and what is known of each branch.

    A completion without branches has one column without a role, number 0, which all of its rows are of.

    Example, a completion of three branches, the last of them a title in a single row, and one without branches::

        numbers_R      [0 1 1 2 0]
        roles_CW       [[0 1 3] [-1 -1 -1]]        0 is BRANCH_ROLES[0], "main"
        discarded_CW   [[-1 -1 0] [-1 -1 -1]]      0 is DISCARD_REASONS[0], "role"
        compactions_C  [0 0]
    """

    numbers_R: Tensor
    """int64, position of the row's branch among those of its completion."""
    roles_CW: Tensor
    """int64, code into `BRANCH_ROLES`, or `NONE`; W is the largest number of branches of a completion, 1 or more."""
    discarded_CW: Tensor
    """int64, why the branch bears no loss: code into `DISCARD_REASONS`, or `NONE`."""
    compactions_C: Tensor
    """int64, how often the main line went on from a summary of what came before."""

    @classmethod
    def unbranched(cls, rows: int, completions: int) -> Self:
        """Return the facts of completions without branches."""
        none_CW = torch.full((completions, 1), NONE)
        return cls(
            numbers_R=torch.zeros(rows, dtype=torch.int64),
            roles_CW=none_CW,
            discarded_CW=none_CW.clone(),
            compactions_C=torch.zeros(completions, dtype=torch.int64),
        )

    @classmethod
    def from_completions(cls, completions: Sequence[Completion]) -> Self:
        """Return the facts of these completions, whose rows follow one another in the batch.

        Each row of a completion with branches is of one of them (`has_branch_of_each_row`).
        """
        if not any(completion.branches for completion in completions):
            return cls.unbranched(sum(len(completion.rows) for completion in completions), len(completions))
        width = max(len(completion.branches) for completion in completions)
        roles, discarded = [], []
        for completion in completions:
            free = [NONE] * (width - len(completion.branches))
            roles.append([BRANCH_ROLES.index(branch.role) for branch in completion.branches] + free)
            reasons = [branch.discarded for branch in completion.branches]
            discarded.append([NONE if r is None else DISCARD_REASONS.index(r) for r in reasons] + free)
        numbers = chain.from_iterable(_branch_of_rows(completion) for completion in completions)
        compactions = [sum(map(_is_compaction, completion.branches)) for completion in completions]
        return cls(
            numbers_R=torch.tensor([*numbers], dtype=torch.int64),
            roles_CW=torch.tensor(roles, dtype=torch.int64),
            discarded_CW=torch.tensor(discarded, dtype=torch.int64),
            compactions_C=torch.tensor(compactions, dtype=torch.int64),
        )

    @classmethod
    def merged(cls, facts: Sequence[Self]) -> Self:
        """Return the facts of all these completions, in order."""
        width = max(each.roles_CW.shape[1] for each in facts)

        def columns(name: str) -> Tensor:
            return torch.cat([pad(t, (0, width - t.shape[1]), value=NONE) for t in (getattr(f, name) for f in facts)])

        return cls(
            numbers_R=torch.cat([each.numbers_R for each in facts]),
            roles_CW=columns("roles_CW"),
            discarded_CW=columns("discarded_CW"),
            compactions_C=torch.cat([each.compactions_C for each in facts]),
        )

    @property
    def branched_C(self) -> Tensor:
        """bool: completions that have branches."""
        return (self.roles_CW != NONE).any(dim=1)

    @property
    def main_CW(self) -> Tensor:
        """bool: branches of role main; the only one of a completion without branches is one."""
        return (self.roles_CW == BRANCH_ROLES.index(BranchRole.MAIN)) | ~self.branched_C.unsqueeze(1)

    def sum_rows(self, values_R: Tensor, completion_ids_R: Tensor) -> Tensor:
        """Add up the rows of each branch.

        Args:
            values_R: such as tokens.
            completion_ids_R: int64, the completion that each row belongs to.

        Returns:
            (C, W), of the dtype of the values; 0 for a branch without rows.
        """
        completions, width = self.roles_CW.shape
        codes_R = completion_ids_R * width + self.numbers_R
        return values_R.new_zeros(completions * width).index_add(0, codes_R, values_R).view(completions, width)

    def longest_C(self, tokens_R: Tensor, completion_ids_R: Tensor) -> Tensor:
        """Return the tokens of each completion's longest branch that is not discarded, int64; 0 without any.

        `rollout.max_tokens` holds for each branch, so this is what a penalty for length compares with it.
        """
        tokens_CW = self.sum_rows(tokens_R, completion_ids_R)
        return torch.where(self.discarded_CW == NONE, tokens_CW, 0).amax(dim=1)

    def discarded_rows(self, completion_ids_R: Tensor) -> dict[DiscardReason, Tensor]:
        """Return the rows (bool, R) of discarded branches by reason, for reasons that occur."""
        discarded_R = self.discarded_CW[completion_ids_R, self.numbers_R]
        codes = torch.unique(discarded_R).tolist()
        return {reason: discarded_R == code for code, reason in enumerate(DISCARD_REASONS) if code in codes}


BRANCH_METRICS: Final[dict[str, str]] = {
    "tokens/branch_*": "sampled tokens of discarded branches by reason, valid or not",
    "branches/discarded/*": "`tokens/branch_*` divided by `tokens/sampled`",
    "branches/role/*": "branches by role: mean over completions in B that have branches",
    "branches/compactions": "how often the main line went on from a summary: mean over the same completions",
}
"""Metrics of batches with branches, by name."""


def branch_metrics(
    branches: BranchFacts, completion_ids_R: Tensor, sampled_R: Tensor, valid_C: Tensor
) -> dict[str, float]:
    """Return the metrics of a batch in `BRANCH_METRICS`, for roles and reasons that occur.

    Args:
        branches: of the batch.
        completion_ids_R: int64, the completion that each row belongs to.
        sampled_R: int64, sampled tokens of each row.
        valid_C: bool, completions in B.
    """
    metrics: dict[str, float] = {}
    for reason, rows_R in branches.discarded_rows(completion_ids_R).items():
        tokens = int(sampled_R[rows_R].sum())
        metrics |= {f"tokens/branch_{reason}": tokens, f"branches/discarded/{reason}": tokens / int(sampled_R.sum())}
    counted_C = valid_C & branches.branched_C
    if bool(counted_C.any()):
        for code, role in enumerate(BRANCH_ROLES):
            count_C = (branches.roles_CW[counted_C] == code).sum(dim=1)
            metrics |= {f"branches/role/{role}": float(count_C.double().mean())} if bool(count_C.any()) else {}
        metrics["branches/compactions"] = float(branches.compactions_C[counted_C].double().mean())
    return metrics


def branch_rule(reason: DiscardReason) -> str:
    """Return the name of the rejection rule that takes out branches discarded for this reason."""
    return f"branch_{reason}"


def has_branch_of_each_row(completion: Completion) -> bool:
    """Whether a completion has no branches, or each of its rows is of exactly one of them."""
    rows = sorted(row for branch in completion.branches for row in branch.rows)
    return not completion.branches or rows == [*range(len(completion.rows))]


def _is_compaction(branch: Branch) -> bool:
    """Whether the main line goes on in it from a summary: it comes from a branch, and starts with none of its turns."""
    return branch.role is BranchRole.MAIN and branch.parent is not None and branch.after_turn is None


def _branch_of_rows(completion: Completion) -> list[int]:
    """Return the position of each row's branch; zeros for a completion without branches."""
    if not completion.branches:
        return [0] * len(completion.rows)
    return [number for _, number in sorted((r, n) for n, branch in enumerate(completion.branches) for r in branch.rows)]
