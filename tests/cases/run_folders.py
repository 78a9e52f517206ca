"""Run folders, as runs leave them."""

from collections.abc import Sequence
from pathlib import Path

from stream.codec import encode
from stream.records import Group, TrainedCompletion
from stream.trainer.archive import Archive
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import LedgerOutcome, LedgerRecord, Trained, content_hash
from stream.trainer.trained_tokens import TrainedTokenFiles


def write_run(folder: Path, name: str = "r", *, redis: str = "", environments: str = "", reward: str = "a:b") -> Path:
    """Write a run's settings into its folder, which is created; return the folder.

    Args:
        folder: of the run.
        name: of the run.
        redis: URL of its server.
        environments: lines of that table.
        reward: reference of its only reward function.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server = f'redis = "{redis}"\n' if redis else ""
    (folder / "run.toml").write_text(
        f'[run]\nname = "{name}"\nfolder = "{folder}"\n{server}[model]\npath = "none"\n[data]\npath = "none"\n'
        f'[environments]\n{environments}\n[[rewards]]\nref = "{reward}"\n'
    )
    return folder


class ArchivedRun:
    """A run's folder, in which groups end one after the other, each in a segment of its own."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.path = write_run(folder, **settings)

    def end(
        self,
        group: Group,
        step: int = 1,
        outcome: LedgerOutcome = Trained(),  # noqa: B008  (a record)
        *,
        done: Sequence[TrainedCompletion] = (),
        in_ledger: bool = True,
        in_archive: bool = True,
    ) -> None:
        """End a group as the trainer does.

        Args:
            group: what the ledger and the archive say of it.
            step: that ended it.
            outcome: of it.
            done: what the step did with its completions.
            in_ledger: False stands for a trainer that was killed before it wrote there.
            in_archive: False stands for a run that keeps no groups.
        """
        record = LedgerRecord(group.prompt.id, outcome, step, step - 1, content_hash(group))
        if in_archive:
            files = TrainedTokenFiles(self.path / "trained_tokens", 1_000_000)
            archive = Archive(self.path / "groups", trained_tokens=files)
            archive.write([(record, encode(group))], {group.prompt.id: done})
            archive.close()
        ledger = self.ledger()
        if in_ledger:
            ledger.append([record])
            ledger.sync()
        ledger.close()

    def ledger(self) -> Ledger:
        """Open the ledger behind all that it holds."""
        file = self.path / "ledger.jsonl"
        return Ledger(file, file.stat().st_size if file.exists() else 0)
