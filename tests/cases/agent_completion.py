"""A completion of an agent with every kind of branch, and what a step did with it."""

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
