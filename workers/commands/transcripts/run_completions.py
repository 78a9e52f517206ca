"""One completion of a run, with what is known about its group: from the archive, or from the server."""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from stream.records import Completion, Failure, Group, TrainedCompletion
from stream.trainer.ledger_records import LedgerRecord
from stream.validity import Measured, Reward, TruncationReason
from workers.runs.transcript import invalid_reason

UNFINISHED = "unfinished"
"""Outcome of a group that has none yet."""


class RunCompletion(Struct, frozen=True, kw_only=True):
    """One completion of a run, with what is known about its group."""

    group: Group
    completion: Completion
    outcome: str
    """Of the group: `trained`, `dropped:REASON`, or `unfinished`."""
    step: int | None = None
    """The step that ended the group; None if it is unfinished."""
    trained: TrainedCompletion | None = None
    """What the step did with the completion; None if no step had it, or it was not archived."""
    record: LedgerRecord | None = None
    """Of the group; None if it is unfinished."""

    @property
    def reward(self) -> float | None:
        """The value of a measured reward, else None."""
        return self.completion.reward.value if isinstance(self.completion.reward, Measured) else None

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled the completion, ascending."""
        return sorted({span.version for row in self.completion.rows for span in row.spans})

    @property
    def end(self) -> str:
        """How the episode ended: `finished`, why it was truncated, or `failed`."""
        return episode_end(self.completion.failure, self.completion.truncated)

    @property
    def reason(self) -> str:
        """Why the completion is invalid: `failed:REASON` or `reward:REASON`; empty if it is valid."""
        return invalid_code(self.completion.failure, self.completion.reward)

    @property
    def why_invalid(self) -> str:
        """Why the completion is invalid; empty if it is valid."""
        return invalid_reason(self.completion)


def episode_end(failure: Failure | None, truncated: TruncationReason | None) -> str:
    """Return how an episode ended: `finished`, why it was truncated, or `failed`."""
    return "failed" if failure is not None else str(truncated or "finished")


def invalid_code(failure: Failure | None, reward: Reward | None) -> str:
    """Return why a completion is invalid: `failed:REASON` or `reward:REASON`; empty if it is valid."""
    if failure is not None:
        return f"failed:{failure.reason}"
    return "" if reward is None or isinstance(reward, Measured) else f"reward:{reward.reason}"


def unfinished_completions(group: Group) -> Iterator[RunCompletion]:
    """Yield the completions of a group without an outcome."""
    return (RunCompletion(group=group, completion=each, outcome=UNFINISHED) for each in group.completions)


def describe_run_completion(found: RunCompletion) -> dict[str, Any]:
    """Return what `--json` and the exports say about a completion, without its tokens and messages."""
    group, completion, trained = found.group, found.completion, found.trained
    return {
        "prompt_id": group.prompt.id,
        "completion": completion.index,
        "greedy": completion.greedy,
        "environment": group.prompt.environment,
        "epoch": group.prompt.epoch,
        "row": group.prompt.row,
        "step": found.step,
        "outcome": found.outcome,
        "versions": found.versions,
        "end": found.end,
        "why_invalid": found.why_invalid or None,
        "state": trained.state if trained else None,
        "reward": found.reward,
        "advantage": trained.advantage if trained else None,
        "loss_tokens": trained.loss_tokens if trained else None,
        "turns": completion.turns,
        "tool_calls": completion.tool_calls,
        "tool_errors": completion.tool_errors,
        "sampled_tokens": sum(row.sampled_count for row in completion.rows),
        "worker": group.worker,
        "sampled_at": group.rolled_out_at,
    }
