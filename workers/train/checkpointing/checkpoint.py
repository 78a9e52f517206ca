"""Checkpoints: written atomically, verified by hash, and skipped when damaged.

::

    checkpoints/
    ├── step-000040/
    │   ├── model/                 Hugging Face form (config, model.safetensors, tokenizer), which `export` copies;
    │   │                          with LoRA the adapter in peft's form, which `export` merges
    │   ├── optimizer.safetensors  moments by parameter name; float32 weights if the model is written in bfloat16
    │   └── checkpoint.json        the manifest, written last: progress, and size and hash of every other file
    └── step-000050/

A folder gets its name only when all of its files are on the disk. The manifest lists every file, so damage done later
is found too, and an older checkpoint is used instead. The newest checkpoint is the one written by the newest trainer,
whatever its step: that trainer may have resumed from an older checkpoint and cut the ledger to it.
"""

import hashlib
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stream.disk_space import persist
from stream.durable import create_folder_atomically, remove_folder, remove_leftovers
from stream.errors import RunFailedError, RunMismatchError
from stream.trainer.folder_lock import RunFolderLock, hold_optional
from workers.runs.progress import Progress
from workers.train.checkpointing.object_store import SavedCheckpoint, Uploader

if TYPE_CHECKING:
    from workers.train.step.learner import Learner

log = structlog.get_logger()

MANIFEST: Final = "checkpoint.json"
MODEL: Final = "model"
OPTIMIZER: Final = "optimizer.safetensors"


class FileEntry(Struct, frozen=True):
    """Size and hash of a file when it was written."""

    size: int
    blake2b: str


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of `checkpoint.json`."""

    format: Literal[2] = 2
    """Raised by a change that this reader would misread."""
    progress: Progress
    steps: int
    """Batches that the learner was given."""
    skipped_steps: int = 0
    files: dict[str, FileEntry]
    """By path relative to the checkpoint."""
    saved_at: str = ""
    """UTC, ISO 8601."""
    fencing_token: int = 0
    """Fencing token of the trainer that wrote it; a later trainer has a larger one."""
    digest: str = ""
    """Digest of all other fields: one altered byte of this file is noticed, as in the files that it lists."""

    def with_digest(self) -> "Manifest":
        """Return the manifest with its digest."""
        blank = replace(self, digest="")
        digest = hashlib.blake2b(msgspec.json.encode(blank), digest_size=16).hexdigest()
        return replace(blank, digest=digest)

    @property
    def is_intact(self) -> bool:
        """Whether the digest is that of the other fields."""
        return self.digest == self.with_digest().digest


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A checkpoint with all of its files."""

    folder: Path
    manifest: Manifest

    @property
    def progress(self) -> Progress:
        """Where the run was."""
        return self.manifest.progress

    @property
    def model(self) -> Path:
        """Folder of the policy in Hugging Face form, or of the adapter in peft's form."""
        return self.folder / MODEL

    def restore(self, learner: "Learner") -> None:
        """Restore the learner's weights and optimizer state.

        Raises:
            RunMismatchError: the checkpoint belongs to another model.
        """
        manifest = self.manifest
        state = load_file(self.folder / OPTIMIZER)
        learner.restore(self.model, state, steps=manifest.steps, skipped_steps=manifest.skipped_steps)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: of the checkpoints; need not exist.
        keep_last: number of newest checkpoints to keep. The one with the best mean reward is kept as well.
        folder_lock: the trainer's lock on the run's folder, if other trainers may exist.
    """

    def __init__(self, folder: Path, keep_last: int = 2, folder_lock: RunFolderLock | None = None) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.damaged: list[Path] = []
        """Checkpoints that `require_latest` could not use."""
        self._folder_lock = folder_lock
        self.uploader: Uploader | None = None
        """Gets each saved checkpoint; a checkpoint that it still reads is not removed."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint with all of its files."""
        return not self.list_all()

    def save(self, step: int, learner: "Learner", progress: Progress) -> Checkpoint:
        """Write a checkpoint and remove those beyond `keep_last`. It is durable on return.

        While the disk is full, this waits for room.

        Raises:
            RunFailedError: the checkpoint could not be written. Earlier checkpoints remain, and no partial one is left.
            FencedError: another trainer has taken over the run's folder; the same holds.
        """
        with hold_optional(self._folder_lock):
            remove_leftovers(self.folder)
        target = self._free_name(step)
        try:
            manifest = persist(self.folder, lambda: self._write(target, learner, progress), (OSError, SafetensorError))
        except (OSError, SafetensorError) as error:
            # If another trainer removed the unfinished folder, the lock raises FencedError, the true cause.
            with hold_optional(self._folder_lock):
                previous = self.latest()
            stands = f"{previous.folder.name} stands" if previous else "there is none before it"
            raise RunFailedError(
                f"checkpoint {target.name} could not be written to {self.folder}: {error}; {stands}. "
                "Make room on that disk and run again: the run resumes from there"
            ) from error
        log.info("checkpoint.saved", step=step, version=progress.version, folder=str(target))
        saved = Checkpoint(folder=target, manifest=manifest)
        self.upload(saved)
        with hold_optional(self._folder_lock):
            self._prune()
        return saved

    def _write(self, target: Path, learner: "Learner", progress: Progress) -> Manifest:
        """Write all files of a checkpoint; returns its manifest as it was written."""
        with create_folder_atomically(target, hold_optional(self._folder_lock)) as temporary:
            (temporary / MODEL).mkdir()
            learner.write_trained_weights(temporary / MODEL)
            save_file(learner.state(), temporary / OPTIMIZER)
            manifest = Manifest(
                progress=progress,
                steps=learner.steps,
                skipped_steps=learner.skipped_steps,
                files=_inventory(temporary),
                saved_at=datetime.now(UTC).isoformat(),
                fencing_token=0 if self._folder_lock is None else self._folder_lock.token,
            ).with_digest()
            written = msgspec.json.encode(manifest)
            (temporary / MANIFEST).write_bytes(msgspec.json.format(written))
        return msgspec.json.decode(written, type=Manifest)

    def upload(self, checkpoint: Checkpoint) -> None:
        """Have a checkpoint copied to object storage, if the run has one; returns immediately."""
        if self.uploader is not None:
            progress = checkpoint.progress
            self.uploader.request(
                SavedCheckpoint(checkpoint.folder, progress.step, progress.ledger_bytes, progress.metrics_bytes)
            )

    def latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint; None if there is none."""
        return _first_intact(reversed(self.list_all()))

    def require_latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint; None if the run has none yet.

        Raises:
            RunMismatchError: there are checkpoints, and all of them are damaged: the run would begin anew.
        """
        self.damaged.clear()
        readable = self.list_all()
        self.damaged += sorted(set(self._folders()) - {checkpoint.folder for checkpoint in readable})
        for checkpoint in reversed(readable):
            if _first_intact([checkpoint]):
                return checkpoint
            self.damaged.append(checkpoint.folder)
        if self.damaged:
            raise RunMismatchError(
                f"no checkpoint in {self.folder} is intact: {', '.join(path.name for path in self.damaged)} lack "
                "files, or were altered. Restore one of them; to begin the run anew, give it another run.name"
            )
        return None

    def best(self) -> Checkpoint | None:
        """Return the intact checkpoint with the best mean reward, the newer of equals; None if there is none."""
        latest_first = self.list_all()[::-1]
        return _first_intact(sorted(latest_first, key=_reward, reverse=True))

    def at_step(self, step: int) -> Checkpoint | None:
        """Return the newest intact checkpoint of a step; None if there is none."""
        return _first_intact(c for c in reversed(self.list_all()) if c.progress.step == step)

    def list_all(self) -> list[Checkpoint]:
        """List checkpoints whose files all exist in their right size, oldest first. Contents are not verified."""
        found = [_read(folder) for folder in self._folders()]
        return sorted((c for c in found if c), key=_age)

    def _folders(self) -> list[Path]:
        return [folder for folder in self.folder.glob("step-*") if folder.is_dir()]

    def _free_name(self, step: int) -> Path:
        """Return `step-000050`, or `step-000050-2` if a resumed run reaches that step again."""
        target, count = self.folder / f"step-{step:06d}", 1
        while target.exists():
            count += 1
            target = self.folder / f"step-{step:06d}-{count}"
        return target

    def _prune(self) -> None:
        """Remove all checkpoints but the newest `keep_last` and the best."""
        found = self.list_all()
        rewarded = [c for c in found if c.progress.mean_reward is not None]
        kept = {c.folder for c in found[-self.keep_last :]} | {
            max(reversed(rewarded), key=_reward).folder for _ in rewarded[:1]
        }
        if self.uploader is not None:
            kept |= self.uploader.in_use
        for checkpoint in found:
            if checkpoint.folder not in kept:
                remove_folder(checkpoint.folder)
                log.info("checkpoint.removed", folder=str(checkpoint.folder))


def _age(checkpoint: Checkpoint) -> tuple[int, int, str, str]:
    manifest = checkpoint.manifest
    return manifest.fencing_token, manifest.progress.step, manifest.saved_at, checkpoint.folder.name


def _reward(checkpoint: Checkpoint) -> float:
    reward = checkpoint.progress.mean_reward
    return -math.inf if reward is None else reward


def _inventory(folder: Path) -> dict[str, FileEntry]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): FileEntry(path.stat().st_size, _hash(path)) for path in files}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _read(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder; None, with a log line, if the manifest or a file is missing or damaged."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        wrong = [name for name, file in manifest.files.items() if (folder / name).stat().st_size != file.size]
    except (OSError, ValueError) as error:
        log.error("checkpoint.skipped", folder=str(folder), why=str(error))  # noqa: TRY400  (the message says it all)
        return None
    if not manifest.is_intact:
        log.error("checkpoint.skipped", folder=str(folder), why=f"{MANIFEST} was altered")
        return None
    if wrong:
        log.error(
            "checkpoint.skipped", folder=str(folder), why=f"{wrong[0]} does not have the size that it was written with"
        )
        return None
    return Checkpoint(folder=folder, manifest=manifest)


def _is_unaltered(path: Path, file: FileEntry) -> bool:
    try:
        return _hash(path) == file.blake2b
    except OSError:  # a disk that cannot read it
        return False


def _first_intact(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the first checkpoint whose files all have their recorded hash."""
    for checkpoint in checkpoints:
        files = checkpoint.manifest.files
        altered = [name for name, file in files.items() if not _is_unaltered(checkpoint.folder / name, file)]
        if not altered:
            return checkpoint
        log.error("checkpoint.skipped", folder=str(checkpoint.folder), why=f"{altered[0]} was altered")
    return None
