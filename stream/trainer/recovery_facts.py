"""What a trainer that starts finds on the server, compared with its ledger."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from stream.trainer.archive import scan_archive
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import OPERATOR, Dropped


def archived_prompts(folder: Path) -> set[str]:
    """Return the prompts in the archive of a run's folder: each was trained or dropped by a trainer of this run."""
    return {record.prompt for record, _ in scan_archive(folder / "groups")}


class RecoveryFacts(Struct):
    """The server's prompts, compared with the ledger."""

    marked: dict[str, str]
    """Prompt by entry."""
    again: dict[str, str]
    """Marked entries whose prompt has no outcome in the ledger, with the prompt."""
    ended: list[str]
    """Unfinished prompts that have an outcome in the ledger."""
    unexplained: int
    """How many more prompts have ended on the server than in the ledger."""
    acknowledged: int
    """Length of the ledger whose groups the server has deleted; -1: unknown."""
    is_abandoned: bool
    """A part of that ledger was cut off when an older checkpoint was used."""
    ledger_bytes: int
    """Length of the ledger whose groups the trainer's weights contain."""

    @classmethod
    def compare(cls, answer: Any, ledger: Ledger) -> "RecoveryFacts":
        """Evaluate the answer of `read_recovery`."""
        ended_on_server, acknowledged, flat, unfinished, acknowledged_by = answer
        texts = [item.decode(errors="replace") for item in flat]
        marks = list(zip(texts[::3], texts[1::3], texts[2::3], strict=True))
        recorded = len(ledger.outcomes) - list(ledger.outcomes.values()).count(Dropped(OPERATOR))
        again = {entry: prompt for entry, prompt, _ in marks if prompt not in ledger.outcomes}
        reopened = sum(bool(counted) for entry, _, counted in marks if entry in again)
        names = [prompt.decode(errors="replace") for prompt in unfinished]
        ended = [prompt for prompt in names if prompt in ledger.outcomes]
        operator = sum(ledger.outcomes[prompt] == Dropped(OPERATOR) for prompt in ended)
        return cls(
            marked={entry: prompt for entry, prompt, _ in marks},
            again=again,
            ended=ended,
            unexplained=ended_on_server - reopened + len(ended) - operator - recorded,
            acknowledged=acknowledged,
            is_abandoned=ledger.is_abandoned(acknowledged, acknowledged_by),
            ledger_bytes=ledger.length,
        )

    @property
    def must_rebuild(self) -> bool:
        """Whether the server has deleted groups that the checkpoint lacks."""
        return self.acknowledged > self.ledger_bytes or self.is_abandoned or self.unexplained > 0

    def log(self) -> dict[str, int]:
        """Return what the log says."""
        return {"deleted_to": self.acknowledged, "checkpoint_at": self.ledger_bytes}
