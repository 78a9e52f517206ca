"""What became of one batch, as the trainer hears of it."""

from dataclasses import dataclass

from stream.validity import DropReason
from workers.train.step.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What became of one batch."""

    trained: bool
    """The optimizer moved, at least once."""
    skipped: str
    """Why not, or why it stopped before its last update: `no_valid_row`, `gradient_not_finite`; else empty."""
    dropped: dict[str, DropReason]
    """Groups that rollout correction left with too little to train on, by prompt id."""
    loss: float
    """Mean over updates; 0.0 where nothing was valid; may be NaN where the step was skipped."""
    metrics: Metrics
    """By the names in `workers.train.step.metrics.NAMES`."""
