"""A learner whose weights show which prompts it was trained on, and how often.

It has one parameter per prompt, the loss is minus the sum of a batch's parameters, plain SGD has learning rate 1.
A prompt's parameter therefore counts the batches that contained the prompt. No bookkeeping is involved, and checkpoints
hold it as they hold any weights. `role.py` makes it the learner of a trainer; subclasses add what single tests need.
"""

import json
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stream.durable import create_folder_atomically
from workers.datasets.sources import open_source
from workers.settings import Settings
from workers.train.step.batch import Batch
from workers.train.step.step_metrics import StepReport

FILE = "model.safetensors"
FULL_AFTER = "full_after"
"""File in the run's folder: the last step whose checkpoint still finds space, of a heavy witness."""
STOP_AT, FIFO = "stop_at", "fifo"
"""Files beside the run's folder: where a stopping witness blocks, and the pipe whose other end lets it go on."""
_BALLAST = 1 << 18


class Witness:
    """Implements the trainer's `Learner` interface, with one parameter for each row of the prompt file."""

    choice = None
    """It has no passes whose tokens could be chosen."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        self.vocab_size = json.loads((Path(settings.model.path) / "config.json").read_text())["vocab_size"]
        self._max_staleness = settings.pacing.max_staleness
        self.steps = 0
        self.skipped_steps = 0
        self.counts = torch.nn.Parameter(torch.zeros(len(open_source(settings.data))))
        self._optimizer = torch.optim.SGD([self.counts], lr=1.0)

    def step(self, batch: Batch, version: int, **_dropped: object) -> StepReport:
        """Train on one batch."""
        self._optimizer.zero_grad()
        loss = -self.counts[[row_of(prompt) for prompt in batch.prompt_ids]].sum()
        loss.backward()
        self._optimizer.step()
        self.steps += 1
        ages_N = (version - batch.versions_RT[batch.sampled_RT]).float()
        metrics = {
            "step": self.steps,
            "tokens/sampled": len(ages_N),
            "staleness/mean": ages_N.mean().item(),
            "staleness/max": int(ages_N.max()),
            "staleness/over": (ages_N > self._max_staleness).float().mean().item(),
            "rows/valid": len(batch.facts.group_ids_C),
        }
        return StepReport(trained=True, skipped="", dropped={}, loss=loss.item(), metrics=metrics)

    def copy_weights(self) -> Callable[[Path], None]:
        """Copy the weights; return a function that writes the copy to a new folder."""
        copy, steps = self.counts.detach().clone(), self.steps

        def write(folder: Path) -> None:
            with create_folder_atomically(folder) as temporary:
                self.write_copy(temporary, copy, steps)

        return write

    def write_copy(self, folder: Path, counts: Tensor, _steps: int) -> None:
        """Write the weights of a step into an existing folder."""
        save_file({"counts": counts}, folder / FILE)

    def write_trained_weights(self, folder: Path) -> None:
        """Write the weights into an existing folder."""
        self.write_copy(folder, self.counts.detach(), self.steps)

    def state(self) -> dict[str, Tensor]:
        """Empty: plain SGD has no state."""
        return {}

    def restore(self, folder: Path, _state: Mapping[str, Tensor], *, steps: int, skipped_steps: int = 0) -> None:
        """Restore these weights."""
        with torch.no_grad():
            self.counts.copy_(testimony(folder))
        self.steps, self.skipped_steps = steps, skipped_steps


class HeavyWitness(Witness):
    """A witness with an optimizer state, the only thing that does not fit on a disk that fills up."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._full_after = settings.folder / FULL_AFTER

    def state(self) -> dict[str, Tensor]:
        """Return the state that needs disk space."""
        if self._full_after.exists() and self.steps > int(self._full_after.read_text()):
            _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_BALLAST, hard))
        return {"ballast": torch.zeros(_BALLAST)}


class StoppingWitness(Witness):
    """A witness that blocks once: at `step:N`, where step N is trained and nothing of it recorded, or at `weights:N` or
    `model:N`, where the weights of a version or of a checkpoint are written but not yet renamed to their final name.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._point = (settings.folder.parent / STOP_AT).read_text()
        self._fifo = settings.folder.parent / FIFO

    def step(self, batch: Batch, version: int, **dropped: object) -> StepReport:
        """Train on one batch."""
        report = super().step(batch, version, **dropped)
        self._stop("step", self.steps)
        return report

    def write_copy(self, folder: Path, counts: Tensor, steps: int) -> None:
        """Write the weights of a step into an existing folder."""
        super().write_copy(folder, counts, steps)
        self._stop("model" if folder.name == "model" else "weights", steps)

    def _stop(self, what: str, step: int) -> None:
        if f"{what}:{step}" == self._point:
            self._fifo.read_bytes()


def testimony(folder: Path) -> Tensor:
    """Return how often each row was trained, from weights that a witness wrote."""
    return load_file(folder / FILE)["counts"]


def row_of(prompt_id: str) -> int:
    """Return the row number in the id that the feeder gives a prompt (`prompts:EPOCH:ROW`)."""
    return int(prompt_id.rpartition(":")[2])
