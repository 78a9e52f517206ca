"""What each branch of an episode is for, found out when the episode has ended.

What a program says by its headers counts (`request_source`). Without it the conversations decide: the first one with
tools is the task itself, and what a later conversation begins with was a summary of it.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from envs.messages import content_text, messages_text
from stream.records import BranchRole, Message
from workers.rollout.agent_endpoint.branches import BranchBuilder, Turn

_LEAST_QUOTE: Final = 16
"""Characters of a passage, at least, by which another message quotes an answer: shorter ones occur by chance."""
_ENDS_PASSAGE: Final = re.compile(r"[\n<>]")


class BranchFacts(NamedTuple):
    """What a branch is for, and where it comes from."""

    role: BranchRole
    parent: BranchBuilder | None


def find_roles(branches: Sequence[BranchBuilder]) -> list[BranchFacts]:
    """Return the role and the parent of each branch, given in the order of their first turns."""
    only_with_tools = any(branch.has_tools for branch in branches)
    found: list[BranchFacts] = []
    for number, branch in enumerate(branches):
        summary = _summary_of(branch, branches[:number])
        if summary is not None and summary.source.role is None:  # only now does it turn out to be one
            position = branches.index(summary)
            parent = found[position].parent or _latest_main(branches[:position], found)
            found[position] = BranchFacts(BranchRole.COMPACT, parent)
        if branch.parent is not None:
            own, parent = found[branches.index(branch.parent)].role, branch.parent
        elif branch.has_tools or not only_with_tools:
            own, parent = _role_of_root(branch, branches[:number], found, summary)
        else:
            own, parent = (BranchRole.OTHER if is_quoted(branch.tip, branches) else BranchRole.SIDE), None
        named = _with_name(branch.source.parent, branches[:number])
        role = branch.source.role or own
        if role is BranchRole.COMPACT:
            parent = parent or _latest_main(branches, found)
        found.append(BranchFacts(role, named or parent))
    return found


def last_main(branches: Sequence[BranchBuilder]) -> BranchBuilder | None:
    """Return the branch of the task that had the last turn; None before a turn."""
    mains = [branch for branch, facts in zip(branches, find_roles(branches), strict=True) if facts.role == "main"]
    return max(mains, key=lambda branch: branch.tip.order, default=None)


def _role_of_root(
    branch: BranchBuilder, before: Sequence[BranchBuilder], found: Sequence[BranchFacts], summary: BranchBuilder | None
) -> tuple[BranchRole, BranchBuilder | None]:
    """Return role and parent of a conversation that begins anew."""
    if summary is not None:
        summarized = found[before.index(summary)].parent
        return (found[before.index(summarized)].role if summarized in before else BranchRole.MAIN), summary
    same = [each for each in before if each.opening == branch.opening or _have_one_name(each, branch)]
    if same:
        facts = found[before.index(same[-1])]
        is_sibling = same[-1].turns[0].asked == branch.turns[0].asked
        return (BranchRole.MAIN if facts.role is BranchRole.COMPACT else facts.role), None if is_sibling else same[-1]
    if any(facts.role is BranchRole.MAIN for facts in found):
        return BranchRole.SUB, None
    return BranchRole.MAIN, None


def _have_one_name(one: BranchBuilder, other: BranchBuilder) -> bool:
    return bool(one.source.name) and one.source.name == other.source.name and one.has_tools == other.has_tools


def _with_name(name: str, branches: Sequence[BranchBuilder]) -> BranchBuilder | None:
    """Return the newest of these branches with this name."""
    return next((branch for branch in reversed(branches) if name and branch.source.name == name), None)


def _latest_main(branches: Sequence[BranchBuilder], found: Sequence[BranchFacts]) -> BranchBuilder | None:
    mains = [branch for branch, facts in zip(branches, found, strict=False) if facts.role is BranchRole.MAIN]
    return mains[-1] if mains else None


def _summary_of(branch: BranchBuilder, before: Sequence[BranchBuilder]) -> BranchBuilder | None:
    """Return the call whose answer a conversation begins with, if that may be a summary."""
    if branch.parent is not None or branch.source.role not in {None, BranchRole.MAIN}:
        return None
    for number in reversed(range(len(before))):
        call = before[number]
        if len(call.turns) == 1 and not call.tip.is_continued and _quotes(branch.turns[0].added, call.tip):
            return call if _has_history(call, before[:number]) else None
    return None


def _has_history(branch: BranchBuilder, before: Sequence[BranchBuilder]) -> bool:
    """Whether a conversation begins with turns of an earlier one, with their texts, or with its name."""
    name, added = branch.source.name, branch.turns[0].added
    return branch.parent is not None or any(
        (name and other.source.name == name) or any(_quotes(added, turn) for turn in other.turns) for other in before
    )


def is_quoted(turn: Turn, branches: Sequence[BranchBuilder]) -> bool:
    """Whether a request of another branch holds this turn's answer, or its longest passage."""
    return any(_quotes(each.added, turn) for branch in branches if branch is not turn.branch for each in branch.turns)


def _quotes(messages: Sequence[Message], turn: Turn) -> bool:
    answer = content_text(turn.message.get("content")).strip()
    if any(message["role"] == "assistant" and content_text(message.get("content")) == answer for message in messages):
        return bool(answer)
    passage = max(_ENDS_PASSAGE.split(answer), key=len).strip()  # programs take the tags off a summary
    return len(passage) >= _LEAST_QUOTE and passage in messages_text(messages)
