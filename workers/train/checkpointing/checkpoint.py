"""Checkpoints: whole, verified, and never a broken one chosen.

::

    checkpoints/
    ├── step-000040/
    │   ├── model/                 Hugging Face form: config, model.safetensors, tokenizer; what `export` copies.
    │   │                          With LoRA the adapter in peft's form, which `export` merges
    │   ├── optimizer.safetensors  moments by parameter name; float32 weights where the model is written in bfloat16
    │   └── checkpoint.json        the manifest, written last: progress, and size and hash of every other file
    └── step-000050/

A folder gets its name only when all of it is on the disk. The manifest lists every file, so that damage done later is
found too, and an older checkpoint is chosen instead. What a later trainer wrote is newer, whatever its step: it may
have begun again from an older checkpoint, and cut the ledger to that one.
"""

import hashlib
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stream.durable import create_folder_atomically, remove_folder, remove_leftovers
from stream.errors import RunFailedError
from stream.trainer.folder_lock import RunFolderLock, hold_optional
from workers.train.progress import Progress

if TYPE_CHECKING:
    from workers.train.step.learner import Learner

log = structlog.get_logger()

MANIFEST: Final = "checkpoint.json"
MODEL: Final = "model"
OPTIMIZER: Final = "optimizer.safetensors"


class FileEntry(Struct, frozen=True):
    """A file of a checkpoint as it was written."""

    size: int
    blake2b: str


class Manifest(Struct, frozen=True, kw_only=True):
    """What `checkpoint.json` says."""

    format: int = 1
    progress: Progress
    steps: int
    """The learner's count of batches."""
    skipped_steps: int = 0
    files: dict[str, FileEntry]
    """By path within the checkpoint."""
    saved_at: str = ""
    """UTC, ISO 8601."""
    fencing_token: int = 0
    """The fencing token of the trainer that wrote it: a later trainer's is larger."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    """One complete checkpoint."""

    folder: Path
    manifest: Manifest

    @property
    def progress(self) -> Progress:
        """How far the run had come."""
        return self.manifest.progress

    @property
    def model(self) -> Path:
        """The policy in Hugging Face form; or the adapter in peft's."""
        return self.folder / MODEL

    def restore(self, learner: "Learner") -> None:
        """Put the learner back to where it was when this was saved.

        Raises:
            RunMismatchError: the checkpoint belongs to another model.
        """
        manifest = self.manifest
        state = load_file(self.folder / OPTIMIZER)
        learner.restore(self.model, state, steps=manifest.steps, skipped_steps=manifest.skipped_steps)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they live; need not exist.
        keep_last: how many of the latest stay. The one with the best mean reward stays besides.
        fence: the trainer's right to write here, where another one may come.
    """

    def __init__(self, folder: Path, keep_last: int = 2, fence: RunFolderLock | None = None) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self._fence = fence

    @property
    def is_empty(self) -> bool:
        """There is no checkpoint, or none with all its files."""
        return not self.list_all()

    def save(self, step: int, learner: "Learner", progress: Progress) -> Checkpoint:
        """Write a checkpoint and remove those that are not to be kept. Durable when it returns.

        Raises:
            RunFailedError: it could not be written. The ones before stand, nothing half written is left.
            FencedError: a successor has taken the run's folder. The same.
        """
        with hold_optional(self._fence):
            remove_leftovers(self.folder)
        target = self._free_name(step)
        try:
            with create_folder_atomically(target, hold_optional(self._fence)) as temporary:
                (temporary / MODEL).mkdir()
                learner.write_trained_weights(temporary / MODEL)
                save_file(learner.state(), temporary / OPTIMIZER)
                manifest = Manifest(
                    progress=progress,
                    steps=learner.steps,
                    skipped_steps=learner.skipped_steps,
                    files=_inventory(temporary),
                    saved_at=datetime.now(UTC).isoformat(),
                    fencing_token=0 if self._fence is None else self._fence.token,
                )
                written = msgspec.json.encode(manifest)
                (temporary / MANIFEST).write_bytes(msgspec.json.format(written))
        except (OSError, SafetensorError) as error:
            with hold_optional(
                self._fence
            ):  # a successor clears away what we had begun: then that is what is to be told
                before = self.latest()
            stands = f"{before.folder.name} stands" if before else "there is none before it"
            raise RunFailedError(
                f"checkpoint {target.name} could not be written to {self.folder}: {error}; {stands}. "
                "Make room on that disk and run again: the run resumes from there"
            ) from error
        log.info("checkpoint.saved", step=step, version=progress.version, folder=str(target))
        with hold_optional(self._fence):
            self._prune()
        return Checkpoint(folder=target, manifest=msgspec.json.decode(written, type=Manifest))

    def latest(self) -> Checkpoint | None:
        """The latest checkpoint that is complete and unaltered; None if there is none."""
        return _first_intact(reversed(self.list_all()))

    def best(self) -> Checkpoint | None:
        """The checkpoint with the best mean reward that is complete and unaltered, the later of equals."""
        latest_first = self.list_all()[::-1]
        return _first_intact(sorted(latest_first, key=_reward, reverse=True))

    def at_step(self, step: int) -> Checkpoint | None:
        """The checkpoint of that step, if it is complete and unaltered."""
        return _first_intact(c for c in reversed(self.list_all()) if c.progress.step == step)

    def list_all(self) -> list[Checkpoint]:
        """Every checkpoint with a manifest and all files in their right sizes, oldest first. Contents are not read."""
        found = [_read(folder) for folder in self.folder.glob("step-*") if folder.is_dir()]
        return sorted((c for c in found if c), key=_age)

    def _free_name(self, step: int) -> Path:
        """`step-000050`; with a suffix where a run that went back comes by that step again."""
        target, again = self.folder / f"step-{step:06d}", 1
        while target.exists():
            again += 1
            target = self.folder / f"step-{step:06d}-{again}"
        return target

    def _prune(self) -> None:
        """Remove all but the last ones and the best."""
        found = self.list_all()
        rewarded = [c for c in found if c.progress.mean_reward is not None]
        kept = {c.folder for c in found[-self.keep_last :]} | {
            max(reversed(rewarded), key=_reward).folder for _ in rewarded[:1]
        }
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
    """The checkpoint in a folder if its manifest can be read and every file has its size; else None, loudly."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        wrong = [name for name, file in manifest.files.items() if (folder / name).stat().st_size != file.size]
    except (OSError, msgspec.DecodeError) as error:
        log.error("checkpoint.skipped", folder=str(folder), why=str(error))  # noqa: TRY400 (the reason is enough)
        return None
    if wrong:
        log.error("checkpoint.skipped", folder=str(folder), why=f"{wrong[0]} has not the size it was written with")
        return None
    return Checkpoint(folder=folder, manifest=manifest)


def _first_intact(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """The first whose every file has the contents that it was written with."""
    for checkpoint in checkpoints:
        files = checkpoint.manifest.files
        altered = [name for name, file in files.items() if _hash(checkpoint.folder / name) != file.blake2b]
        if not altered:
            return checkpoint
        log.error("checkpoint.skipped", folder=str(checkpoint.folder), why=f"{altered[0]} was altered")
    return None
