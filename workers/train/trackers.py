"""Trackers: services and files that get each step's metrics, besides `metrics.jsonl`.

One class per tracker. Each is made, used and closed by one thread, and may block or raise.

A tracker's project, server and credentials come from its own environment variables, as without Penstock:

============  =========================================================================================================
wandb         `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_API_KEY`, `WANDB_MODE`
tensorboard   none: event files in `tensorboard/` in the run's folder
trackio       `TRACKIO_PROJECT`, `TRACKIO_SPACE_ID`, `TRACKIO_DIR`
mlflow        `MLFLOW_TRACKING_URI` (without it `mlflow.db` beside the run's folder), `MLFLOW_EXPERIMENT_NAME`
============  =========================================================================================================
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec import Struct

from envs.references import import_extra

_PROJECT: Final = "penstock"
_MLFLOW_TAG: Final = "penstock.run"
_MLFLOW_BATCH: Final = 500
"""Metrics in one request; the server's limit is 1000."""
_MLFLOW_FORBIDDEN: Final = re.compile(r"[^\w\-. :/]")


class TrackedRun(Struct, frozen=True, kw_only=True):
    """What a tracker is given about the run."""

    id: str
    """The same at every start, so that a resumed run continues the tracker's run."""
    name: str
    folder: Path
    settings: dict[str, Any]
    """For the tracker's table of hyperparameters; without URLs and without arguments of user code."""
    first_step: int
    """The first step that will be logged; later ones may have been logged before, by a trainer that was lost."""


class Tracker(Protocol):
    """Receives metrics."""

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log the metrics of a step, which ended at this Unix time."""

    def close(self) -> None:
        """Deliver everything, and mark the tracker's run as ended."""


class WandbTracker:
    """Weights & Biases."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = import_extra("wandb", "wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=run.id,
            name=run.name,
            resume="allow",
            dir=str(run.folder),
            config=run.settings,
            settings=wandb.Settings(console="off"),
        )
        # A repeated step is accepted: W&B's own counter only grows, the x axis is ours.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:  # noqa: ARG002
        """Log a step."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class TensorBoardTracker:
    """Event files in the run's folder; `tensorboard --logdir runs` shows all runs."""

    def __init__(self, run: TrackedRun) -> None:
        import_extra("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step)

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=at)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class TrackioTracker:
    """Trackio."""

    def __init__(self, run: TrackedRun) -> None:
        trackio = import_extra("trackio", "trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=f"{run.name}-{run.id[:8]}",
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            config=run.settings,
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:  # noqa: ARG002
        """Log a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class MlflowTracker:
    """MLflow."""

    def __init__(self, run: TrackedRun) -> None:
        mlflow = import_extra("mlflow", "mlflow")
        self._entities = import_extra("mlflow.entities", "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.parent / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([experiment_id], f"tags.`{_MLFLOW_TAG}` = '{run.id}'", max_results=1)
        if known:
            self._run_id = known[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        made = self._client.create_run(experiment_id, run_name=run.name, tags={_MLFLOW_TAG: run.id})
        self._run_id = made.info.run_id
        params = [self._entities.Param(key, str(value)[:500]) for key, value in flatten(run.settings).items()]
        self._client.log_batch(self._run_id, params=params[:100])

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log a step."""
        found = [
            self._entities.Metric(_MLFLOW_FORBIDDEN.sub("_", name), value, int(1000 * at), step)
            for name, value in metrics.items()
        ]
        for start in range(0, len(found), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, metrics=found[start : start + _MLFLOW_BATCH])

    def close(self) -> None:
        """Mark the run as finished; the next start of it continues it."""
        self._client.set_terminated(self._run_id)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables under names with dots."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


TRACKERS: Final[dict[str, Callable[[TrackedRun], Tracker]]] = {
    "mlflow": MlflowTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
}
"""By the names of `train.trackers`, which are also the names of the extras and of the modules."""
