"""Where a run is: updated by the trainer, stored in each checkpoint, shown in the run's summary."""

from collections.abc import Mapping

from msgspec import Struct, field


class Progress(Struct, kw_only=True):
    """Counts over the whole run. A resumed run continues with the counts of its checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    version: int = -1
    """The last policy version published; -1 before the first."""
    ledger_bytes: int = 0
    """Length of the ledger whose groups the weights contain; a resumed run cuts the rest."""
    ledger_digest: str = ""
    """Digest of that part of the ledger, so that an altered one is refused; empty in earlier releases."""
    metrics_bytes: int = 0
    """Length of the metrics file up to this step; a resumed run cuts the rest."""
    groups: int = 0
    """Groups trained."""
    tokens: int = 0
    """Tokens sampled for groups that were trained."""
    completion_states: dict[str, int] = field(default_factory=dict)
    """Completions of all groups trained or dropped, by state: `valid`, `reward:missing`, `failed:engine`, ..."""
    staleness_sum: float = 0.0
    staleness_count: int = 0
    staleness_max: int = 0
    """Policy versions between sampling and training: sum, count and maximum over tokens with loss."""
    seconds: float = 0.0
    """Wall time of all steps, waiting for their groups included."""
    reward_sum: float = 0.0
    reward_count: int = 0
    """Over completions in the reward baseline, in the steps since the last checkpoint."""
    mean_reward: float | None = None
    """Of the steps between the previous checkpoint and this one; None if no reward was measured."""

    def count_states(self, states: Mapping[str, int]) -> None:
        """Count completions by state."""
        for state, n in states.items():
            self.completion_states[state] = self.completion_states.get(state, 0) + n

    def count_step(self, metrics: Mapping[str, float], groups: int, seconds: float) -> None:
        """Count one optimizer step.

        Args:
            metrics: of the step (`workers.train.step.metrics`).
            groups: number of groups trained on.
            seconds: wall time of the step.
        """
        self.step += 1
        self.groups += groups
        self.seconds += seconds
        self.tokens += int(metrics.get("tokens/sampled", 0))
        self.count_states(
            {name.removeprefix("rows/"): int(n) for name, n in metrics.items() if name.startswith("rows/")}
        )
        count = int(metrics.get("tokens/loss", 0))
        if count:
            self.staleness_sum += metrics["staleness/mean"] * count
            self.staleness_count += count
            self.staleness_max = max(self.staleness_max, int(metrics["staleness/max"]))
        count = int(metrics.get("reward/count", 0))
        if count:
            self.reward_sum += metrics["reward/mean"] * count
            self.reward_count += count

    def end_checkpoint_period(self) -> None:
        """Set the mean reward of the steps since the last checkpoint, and start counting anew."""
        self.mean_reward = self.reward_sum / self.reward_count if self.reward_count else None
        self.reward_sum, self.reward_count = 0.0, 0
