"""How far a run has come: moved forward by the trainer, kept by each checkpoint, told by the summary."""

from collections.abc import Mapping

from msgspec import Struct, field


class Progress(Struct, kw_only=True):
    """Everything that is counted over a whole run. A resumed run goes on with what its checkpoint kept."""

    step: int = 0
    """Optimizer batches done."""
    version: int = -1
    """The last policy version published; -1 before the first."""
    ledger_bytes: int = 0
    """Length of the ledger whose groups these weights contain; resume cuts what lies behind."""
    metrics_bytes: int = 0
    """Length of the metrics file up to this step; resume cuts what lies behind."""
    groups: int = 0
    """Groups trained."""
    tokens: int = 0
    """Tokens sampled for groups that were trained."""
    completion_states: dict[str, int] = field(default_factory=dict)
    """Completions of all groups trained or dropped, by state: `valid`, `reward:missing`, `failed:engine`, ..."""
    staleness_sum: float = 0.0
    staleness_count: int = 0
    staleness_max: int = 0
    """Over tokens that bore loss: versions between sampling and training."""
    seconds: float = 0.0
    """Wall time that the trainer spent from its first wait to its last step."""
    reward_sum: float = 0.0
    reward_count: int = 0
    """Of completions that may vote, in the steps since the checkpoint before."""
    mean_reward: float | None = None
    """Of the steps before this checkpoint; None where nothing was measured."""

    def count_states(self, states: Mapping[str, int]) -> None:
        """Count the completions of a group that was not trained."""
        for state, n in states.items():
            self.completion_states[state] = self.completion_states.get(state, 0) + n

    def count_step(self, metrics: Mapping[str, float], groups: int, seconds: float) -> None:
        """Count one optimizer batch by its metrics (`workers.train.step.metrics`)."""
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
        count = int(metrics.get("sampled/reward_count", 0))
        if count:
            self.reward_sum += metrics["sampled/reward_mean"] * count
            self.reward_count += count

    def end_checkpoint_period(self) -> None:
        """A checkpoint is made: its mean reward is that of the steps since the one before."""
        self.mean_reward = self.reward_sum / self.reward_count if self.reward_count else None
        self.reward_sum, self.reward_count = 0.0, 0
