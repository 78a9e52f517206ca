"""Where a run is: updated by the trainer, stored in each checkpoint, shown in the run's summary."""

from collections.abc import Mapping

from msgspec import Struct, field

from stream.causes import ErrorCause
from stream.records import Group
from stream.validity import Measured


class GroupTotals(Struct, kw_only=True):
    """Sums over all groups that were trained or dropped; without greedy completions unless it says so."""

    groups: int = 0
    compared: int = 0
    """Groups with two or more measured rewards."""
    tied: int = 0
    """Those among them whose rewards are all equal."""
    tied_min: float | None = None
    tied_max: float | None = None
    """Smallest and largest reward of these groups."""
    compared_prompts: int = 0
    """Groups with two or more completions from which something was sampled, greedy ones included."""
    different_prompts: int = 0
    """Those among them whose completions did not all begin with the same prompt, as it was rendered."""
    completions: int = 0
    truncated: int = 0
    truncated_by: dict[str, int] = field(default_factory=dict)
    """Truncated completions by `TruncationReason`."""
    tool_calls: int = 0
    tool_errors: int = 0
    reward_sum: float = 0.0
    reward_count: int = 0
    """Over measured rewards, before the truncation policy."""
    reward_min: float | None = None
    reward_max: float | None = None

    def add(self, group: Group) -> None:
        """Count one group."""
        completions = [completion for completion in group.completions if not completion.greedy]
        self.groups += 1
        prompts = [completion.rows[0].prompt_ids for completion in group.completions if completion.rows]
        self.compared_prompts += len(prompts) > 1
        self.different_prompts += any(prompt != prompts[0] for prompt in prompts)
        self.completions += len(completions)
        for reason in [completion.truncated for completion in completions if completion.truncated is not None]:
            self.truncated += 1
            self.truncated_by[reason] = self.truncated_by.get(reason, 0) + 1
        self.tool_calls += sum(completion.tool_calls for completion in completions)
        self.tool_errors += sum(completion.tool_errors for completion in completions)
        rewards = [c.reward.value for c in completions if c.failure is None and isinstance(c.reward, Measured)]
        if not rewards:
            return
        self.reward_sum += sum(rewards)
        self.reward_count += len(rewards)
        self.reward_min = min(rewards) if self.reward_min is None else min(self.reward_min, *rewards)
        self.reward_max = max(rewards) if self.reward_max is None else max(self.reward_max, *rewards)
        self.compared += len(rewards) > 1
        if len(rewards) > 1 and min(rewards) == max(rewards):
            self.tied += 1
            self.tied_min = rewards[0] if self.tied_min is None else min(self.tied_min, rewards[0])
            self.tied_max = rewards[0] if self.tied_max is None else max(self.tied_max, rewards[0])

    @property
    def mean_reward(self) -> float | None:
        """Mean of all measured rewards; None if there is none."""
        return self.reward_sum / self.reward_count if self.reward_count else None


class Progress(Struct, kw_only=True):
    """Counts over the whole run. A resumed run continues with the counts of its checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    version: int = -1
    """The last policy version published; -1 before the first."""
    ledger_bytes: int = 0
    """Length of the ledger whose groups the weights contain; a resumed run cuts the rest."""
    ledger_digest: str = ""
    """Digest of that part of the ledger, so that an altered one is refused."""
    resumed: list[tuple[int, int]] = field(default_factory=list)
    """Step and version of each checkpoint that the run was resumed from."""
    micro_batch_tokens: list[tuple[int, int]] = field(default_factory=list)
    """The tokens of a pass that were chosen with `train.micro_batch_tokens = "auto"`: the number of steps done before,
    and the tokens. A replay uses the same."""
    metrics_bytes: int = 0
    """Length of the metrics file up to this step; a resumed run cuts the rest."""
    groups: int = 0
    """Groups trained."""
    tokens: int = 0
    """Tokens sampled for groups that were trained."""
    completion_states: dict[str, int] = field(default_factory=dict)
    """Completions of all groups trained or dropped, by state: `valid`, `reward:missing`, `failed:engine`, ..."""
    causes: dict[str, ErrorCause] = field(default_factory=dict)
    """The last exception behind each of these states but `valid`, and behind a tool's error (`tool_error`)."""
    totals: GroupTotals = field(default_factory=GroupTotals)
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
    """Mean of the steps between the previous checkpoint and this one; None if no reward was measured."""

    def count_states(self, states: Mapping[str, int]) -> None:
        """Count completions by state."""
        for state, n in states.items():
            self.completion_states[state] = self.completion_states.get(state, 0) + n

    def count_step(self, metrics: Mapping[str, float], groups: int, seconds: float) -> None:
        """Count one optimizer step.

        Args:
            metrics: of the step (`workers.train.step.step_metrics`).
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
