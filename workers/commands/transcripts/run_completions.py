"""Read a run's completions: from its archive, and from the server while they have no outcome yet.

The ledger decides which archived groups count. A run is only read: it may be running, stopped, killed or finished.
"""

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from stream.codec import decode
from stream.errors import PenstockError, RecordError
from stream.records import Completion, Failure, Group, TrainedCompletion
from stream.trainer.annotations import read_annotations
from stream.trainer.archive import ArchiveOffset, scan_archive
from stream.trainer.ledger_records import LedgerRecord, read_ledger
from stream.trainer.outcomes import encode_outcome
from stream.validity import Measured, Reward, TruncationReason
from workers.runtime.transcript import invalid_reason

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


class ArchivedRunGroups:
    """The archived groups of a run that its ledger confirms, in the order of the ledger. Payloads are read one by one.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        offsets = {(record.prompt, record.hash): (record, offset) for record, offset in scan_archive(folder / "groups")}
        ledger = folder / "ledger.jsonl"
        if ledger.exists():
            records = [line.record for line in read_ledger(ledger)[0] if line.record.has_group]
            found = [(record, offsets.get((record.prompt, record.hash))) for record in records]
            self._entries = [(record, known[1]) for record, known in found if known is not None]
            self.missing = len(records) - len(self._entries)
            """Groups of the ledger that the archive does not have any more."""
        else:
            self._entries = list(offsets.values())
            self.missing = 0
        self._folder = folder
        self._annotated: tuple[LedgerRecord, list[TrainedCompletion]] | None = None
        """Annotations of the group that was annotated last."""
        self.damaged: list[str] = []
        """Messages about groups that could not be read."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last archived step; None without a group."""
        return (self._entries[0][0].step, self._entries[-1][0].step) if self._entries else None

    def read(self, steps: Container[int] | None = None, *, newest_first: bool = False) -> Iterator[RunCompletion]:
        """Yield the completions of groups of these steps; damaged groups are left out and added to `damaged`."""
        for record, offset in reversed(self._entries) if newest_first else self._entries:
            if steps is None or record.step in steps:
                yield from self._read_group(record, offset)

    def annotate(self, found: RunCompletion) -> RunCompletion:
        """Return a completion with what the step did with each of its tokens, if that is recorded."""
        if found.record is None or found.trained is None:
            return found
        if self._annotated is None or self._annotated[0] is not found.record:
            self._annotated = found.record, read_annotations(self._folder, found.record) or []
        others = [each for each in found.group.completions if not each.greedy]
        position = next(at for at, each in enumerate(others) if each is found.completion)
        annotated = self._annotated[1]
        return structs.replace(found, trained=annotated[position]) if position < len(annotated) else found

    def _read_group(self, record: LedgerRecord, offset: ArchiveOffset) -> Iterator[RunCompletion]:
        try:
            group = decode(offset.read_payload(), Group)
            trained = iter(offset.read_completions())
        except (RecordError, PenstockError) as error:
            self.damaged.append(f"{offset.file.name}, byte {offset.offset}: {error}")
            return
        outcome = encode_outcome(record.outcome)
        for completion in group.completions:
            yield RunCompletion(
                group=group,
                completion=completion,
                outcome=outcome,
                step=record.step,
                trained=None if completion.greedy else next(trained, None),
                record=record,
            )


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
