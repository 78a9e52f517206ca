"""The branches of an agent's conversation as a tree for people, with what was sampled and trained of each.

::

    main 1                      3 turns, 412 tokens, trained
    ├─ sub search after turn 1  2 turns, 96 tokens, loss on 90
    └─ compact after turn 3     1 turn, 80 tokens, trained
    main 2 from compact         4 turns, 530 tokens, trained

A conversation that goes on with a summary of itself stands beside the one that was summarized, and not below the
summary: else a program that compacts twenty times would end forty levels deep.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, structs

from stream.records import Branch, BranchRole, Completion, DiscardReason, TrainedCompletion
from stream.validity import TruncationReason
from stream.wording import cut, quantity
from workers.runs.tokens import loss_counts

MAX_DEPTH: Final = 8
"""Levels of a tree; what comes from the deepest one stands beside it."""
_WHY_DISCARDED: Final = {
    DiscardReason.ROLE: "its role is not in agents.train",
    DiscardReason.PROGRAM: "the program asked for it",
    DiscardReason.SUPERSEDED: "another answer was continued",
}
_NAMED_ROWS: Final = 3
"""Rewritten rows that a line names; of more, it says how many there are."""
_NAME_CHARACTERS: Final = 40
"""Length at which a program's name for a branch is cut in its label."""
_MAX_COLUMN: Final = 48
"""Columns before the facts of a line."""


class RewrittenRow(Struct, frozen=True):
    """A row that starts because the history before it was rewritten."""

    row: int
    """Its position in `Completion.rows`."""
    by: str
    """`template` or `program`."""


class BranchView(Struct, frozen=True, kw_only=True):
    """One branch of a completion."""

    number: int
    """Its position in `Completion.branches`."""
    label: str
    """Its role and name, with a number if several branches have the same: `main 2`, `sub explorer`."""
    role: BranchRole
    name: str
    turns: int
    rows: tuple[int, ...]
    """Positions in `Completion.rows`."""
    sampled_tokens: int
    loss_tokens: int | None
    """Sampled tokens that bear loss; None if no step had the completion, or if it is not recorded."""
    parent: int | None
    """The number of the branch that it comes from."""
    after_turn: int | None
    """Number of the parent's turns that it starts with."""
    limited: TruncationReason | None
    rewritten: list[RewrittenRow]
    discarded: DiscardReason | None
    depth: int
    """Its level in the tree, from 0."""
    tree: str
    """What a terminal prints before the label: `│  └─ `."""
    parent_label: str
    """Label of the branch that it comes from; empty if it comes from none."""
    is_below_parent: bool
    """The tree shows where it comes from."""

    @property
    def origin(self) -> str:
        """Where it comes from, as far as the tree does not show it: `after turn 2`, `from compact 1`."""
        turn = f"after turn {self.after_turn}" if self.after_turn else ""
        return turn if self.is_below_parent or not self.parent_label else f"from {self.parent_label} {turn}".strip()

    @property
    def title(self) -> str:
        """Label and origin, to stand apart from the tree: `compact, after turn 2 of main 1`."""
        if not self.parent_label:
            return self.label
        return f"{self.label}, {f'after turn {self.after_turn} of' if self.after_turn else 'from'} {self.parent_label}"

    @property
    def why_untrained(self) -> str:
        """Why the branch is not trained although its completion may be; empty if it is like its completion."""
        return "" if self.discarded is None else _WHY_DISCARDED[self.discarded]

    @property
    def facts(self) -> list[str]:
        """How much it is, whether it was trained, and what happened to it, in a few words each."""
        return [
            quantity(self.turns, "turn"),
            quantity(self.sampled_tokens, "token"),
            *([quantity(len(self.rows), "row")] if len(self.rows) != 1 else []),
            *([text] if (text := self._loss()) else []),
            *([f"limit {self.limited}"] if self.limited else []),
            *_rewritten_texts(self.rewritten),
        ]

    def describe(self) -> dict[str, Any]:
        """Return what `--json` and the exports say about the branch."""
        shown = structs.asdict(self)
        for name in ("depth", "tree", "parent_label", "is_below_parent"):
            del shown[name]
        return shown | {
            "role": str(self.role),
            "rows": list(self.rows),
            "limited": self.limited and str(self.limited),
            "rewritten": [structs.asdict(each) for each in self.rewritten],
            "discarded": self.discarded and str(self.discarded),
        }

    def _loss(self) -> str:
        if self.why_untrained and not self.loss_tokens:
            return f"not trained ({self.discarded})"
        if self.loss_tokens is None or not self.sampled_tokens:
            return ""
        if self.loss_tokens in (0, self.sampled_tokens):
            return "trained" if self.loss_tokens else "no loss"
        return f"loss on {self.loss_tokens:,}"


def describe_branches(completion: Completion, trained: TrainedCompletion | None = None) -> list[BranchView]:
    """Return the branches of a completion in the order of their tree: each is followed by those that come from it.

    Args:
        completion: the completion; it has none if its conversation is a single line.
        trained: what the step did with it; None: no step had it, or it was not archived.
    """
    branches = completion.branches
    parents = [_parent(branches, number) for number in range(len(branches))]
    above = _shown_parents(branches, parents)
    labels = branch_labels(completion)
    losses = loss_counts(completion, trained)
    return [
        _view(completion, number, tree, losses, labels=labels, above=above) for number, tree in _tree_order(above, None)
    ]


def branch_lines(branches: Sequence[BranchView]) -> list[str]:
    """Return a tree as lines of text, one for each branch."""
    heads = [f"{each.tree}{each.label} {each.origin}".rstrip() for each in branches]
    width = min(_MAX_COLUMN, max(map(len, heads), default=0))
    return [f"{head:<{width}}  {', '.join(each.facts)}" for head, each in zip(heads, branches, strict=True)]


def branch_labels(completion: Completion) -> list[str]:
    """Return role and name of each branch, with a number where several are equal."""
    names = [
        f"{branch.role} {cut(' '.join(branch.name.split()), _NAME_CHARACTERS)}".strip()
        for branch in completion.branches
    ]
    totals, counts = Counter(names), Counter[str]()
    labels = []
    for name in names:
        counts[name] += 1
        labels.append(f"{name} {counts[name]}" if totals[name] > 1 else name)
    return labels


def message_branches(completion: Completion) -> Sequence[tuple[int | None, int | None]]:
    """Return for each of `Completion.messages` the number of its branch, and its turn there if it is an answer.

    Turns count from 1. Empty if the completion has no branches, or if their answers are not recorded.
    """
    count = len(completion.messages)
    answers = {
        position: (number, turn)
        for number, branch in enumerate(completion.branches)
        for turn, position in enumerate(branch.answers, 1)
        if 0 <= position < count
    }
    if not answers:
        return ()
    last = number = answers[max(answers)][0]
    found: list[tuple[int | None, int | None]] = []
    for position in reversed(range(count)):  # what stands before an answer was said for it; the rest, after the last
        if position in answers:
            number, turn = answers[position]
            found.append((number, turn))
        else:
            found.append((number if found else last, None))
    return found[::-1]


def trained_in_row(completion: Completion, row: int, trained: TrainedCompletion | None) -> TrainedCompletion | None:
    """Return what the step did with the completion, as far as it holds for one row: a discarded branch has no loss."""
    discarded = next((branch.discarded for branch in completion.branches if row in branch.rows), None)
    if trained is None or discarded is None or loss_counts(completion, trained)[row]:
        return trained
    return structs.replace(trained, state=_WHY_DISCARDED[discarded], advantage=None, loss_tokens=0)


def _view(
    completion: Completion,
    number: int,
    tree: str,
    losses: Sequence[int | None],
    *,
    labels: Sequence[str],
    above: Sequence[int | None],
) -> BranchView:
    branch = completion.branches[number]
    rows = tuple(row for row in branch.rows if 0 <= row < len(completion.rows))
    counts = [losses[row] for row in rows]
    parent = _parent(completion.branches, number)
    return BranchView(
        number=number,
        label=labels[number],
        role=branch.role,
        name=branch.name,
        turns=branch.turns,
        rows=rows,
        sampled_tokens=sum(completion.rows[row].sampled_count for row in rows),
        loss_tokens=None if None in counts else sum(count or 0 for count in counts),
        parent=parent,
        after_turn=branch.after_turn,
        limited=branch.limited,
        rewritten=[RewrittenRow(row, by) for row, by in zip(rows[1:], branch.rewritten, strict=False)],
        discarded=branch.discarded,
        depth=len(tree) // len(_LAST),
        tree=tree,
        parent_label="" if parent is None else labels[parent],
        is_below_parent=parent == above[number],
    )


_MIDDLE, _LAST, _LINE, _GAP = "├─ ", "└─ ", "│  ", "   "


def _tree_order(above: Sequence[int | None], top: int | None, indent: str = "") -> list[tuple[int, str]]:
    """Return the numbers of all branches below one, in the order of the tree, with what is printed before each."""
    below = [number for number, parent in enumerate(above) if parent == top]
    found: list[tuple[int, str]] = []
    for number in below:
        if top is None:
            found += [(number, ""), *_tree_order(above, number)]
        else:
            sign, line = (_LAST, _GAP) if number == below[-1] else (_MIDDLE, _LINE)
            found += [(number, indent + sign), *_tree_order(above, number, indent + line)]
    return found


def _parent(branches: Sequence[Branch], number: int) -> int | None:
    """Return the branch that one comes from. It began earlier; another number is not one that a worker writes."""
    parent = branches[number].parent
    return parent if parent is not None and 0 <= parent < number else None


def _shown_parents(branches: Sequence[Branch], parents: Sequence[int | None]) -> list[int | None]:
    """Return below which branch each one is shown."""
    above: list[int | None] = []
    depths: list[int] = []
    for number, parent in enumerate(parents):
        shown = parent
        if parent is not None and branches[parent].role is BranchRole.COMPACT:
            summarized = parents[parent]
            if summarized is not None and branches[summarized].role is branches[number].role:
                shown = above[summarized]
        if shown is not None and depths[shown] == MAX_DEPTH - 1:
            shown = above[shown]
        above.append(shown)
        depths.append(0 if shown is None else depths[shown] + 1)
    return above


def _rewritten_texts(rewritten: Sequence[RewrittenRow]) -> list[str]:
    by: Mapping[str, list[int]] = {each.by: [] for each in rewritten}
    for each in rewritten:
        by[each.by].append(each.row)
    return [
        f"{quantity(len(rows), 'row') if len(rows) > _NAMED_ROWS else _row_names(rows)} rewritten by {who}"
        for who, rows in by.items()
    ]


def _row_names(rows: Sequence[int]) -> str:
    return f"row{'' if len(rows) == 1 else 's'} {', '.join(map(str, rows))}"
