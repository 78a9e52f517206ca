"""What the tree of an episode becomes in its record: rows, and branches with their roles and discards."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from stream.records import Branch, BranchRole, DiscardReason, Row, Span
from workers.rollout.agent_endpoint.branches import BranchBuilder, Turn
from workers.rollout.agent_endpoint.roles import find_roles, is_quoted


@dataclass(slots=True)
class _Draft:
    """A branch on its way into the record."""

    builder: BranchBuilder
    role: BranchRole
    parent: BranchBuilder | None
    after_turn: int | None
    turns: Sequence[Turn]
    rows: list[Row]
    rewritten: list[str]
    discarded: DiscardReason | None = None


def record_branches(
    builders: Sequence[BranchBuilder], trained: Collection[BranchRole]
) -> tuple[list[Row], list[Branch]]:
    """Return an episode's rows and branches; no branches if there is a single line in which everything is trained.

    Args:
        builders: in the order of their first turns.
        trained: roles of the branches that are trained.
    """
    drafts = _drafts(builders)
    for draft in drafts:
        if draft.discarded is None and not draft.builder.source.is_trained:
            draft.discarded = DiscardReason.PROGRAM
        if draft.discarded is None and draft.role not in trained:
            draft.discarded = DiscardReason.ROLE
    rows: list[Row] = []
    branches = []
    places = {draft.builder: place for place, draft in reversed([*enumerate(drafts)])}
    for draft in drafts:
        first = len(rows)
        rows += draft.rows
        branches.append(
            Branch(
                role=draft.role,
                turns=len(draft.turns),
                limited=draft.builder.limited if draft.turns[-1] is draft.builder.tip else None,
                parent=None if draft.parent is None else places[draft.parent],
                after_turn=draft.after_turn,
                name=draft.builder.source.name,
                rows=tuple(range(first, len(rows))),
                rewritten=tuple(draft.rewritten),
                answers=tuple(turn.position for turn in draft.turns),
                discarded=draft.discarded,
            )
        )
    return rows, [] if _is_plain(branches) else branches


def _is_plain(branches: Sequence[Branch]) -> bool:
    return len(branches) == 1 and branches[0].discarded is None and not branches[0].rewritten


def _drafts(builders: Sequence[BranchBuilder]) -> list[_Draft]:
    """Return the branches, with each superseded answer in one of its own."""
    drafts = []
    superseded = _superseded(builders)
    for builder, (role, parent) in zip(builders, find_roles(builders), strict=True):
        built = [(row.row(), by) for row, by in zip(builder.rows, ["", *builder.rewritten], strict=True)]
        kept = [(row, by) for row, by in built if row is not None]
        rows, rewritten = [row for row, _ in kept], [by for _, by in kept[1:]]
        draft = _Draft(builder, role, parent, builder.after_turn, builder.turns, rows, rewritten)
        drafts.append(draft)
        if builder.tip in superseded:
            drafts += _without_last(draft)
    return drafts


def _without_last(draft: _Draft) -> Iterable[_Draft]:
    """Take the last, superseded turn out of a branch, and yield it as a branch of its own."""
    *turns, last = draft.turns
    if not turns:
        draft.discarded = DiscardReason.SUPERSEDED
        return
    draft.turns = turns
    before, own = split_last(draft.rows.pop())
    if before is not None:
        draft.rows.append(before)
    elif draft.rewritten:
        draft.rewritten.pop()
    yield _Draft(draft.builder, draft.role, draft.builder, len(turns), [last], [own], [], DiscardReason.SUPERSEDED)


def _superseded(builders: Sequence[BranchBuilder]) -> set[Turn]:
    """Return the answers that nothing continued while another answer to the same conversation was continued."""
    siblings: dict[tuple[bytes, str], list[Turn]] = {}
    for builder in builders:
        for turn in builder.turns:
            siblings.setdefault((turn.asked, builder.source.name), []).append(turn)
    return {
        turn
        for turns in siblings.values()
        if any(turn.is_continued for turn in turns)
        for turn in turns
        if not turn.is_continued and len(turn.spoken.token_ids) and not is_quoted(turn, builders)
    }


def split_last(row: Row) -> tuple[Row | None, Row]:
    """Split the last sampled turn off a row; both keep what the model saw.

    Returns:
        The row up to the turn before, None if there is none; and a row whose prompt ends where the turn begins.
    """
    start, end = row.sampled_ranges[-1]
    ids, count = row.token_ids, end - start
    own = Row(
        prompt_ids=row.prompt_ids + ids[: 4 * start],
        token_ids=ids[4 * start : 4 * end],
        sampled_ranges=[(0, count)],
        logprobs=row.logprobs[-4 * count :],
        spans=[Span(s.version, s.start - start, s.end - start) for s in row.spans if s.start >= start],
    )
    ranges = row.sampled_ranges[:-1]
    if not ranges:
        return None, own
    before = Row(
        prompt_ids=row.prompt_ids,
        token_ids=ids[: 4 * ranges[-1][1]],
        sampled_ranges=ranges,
        logprobs=row.logprobs[: -4 * count],
        spans=[span for span in row.spans if span.start < start],
    )
    return before, own
