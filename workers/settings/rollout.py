"""Settings of sampling and evaluation, and of how far rollouts may run ahead of the trainer."""

from typing import Annotated, Literal

from msgspec import Meta, field

from stream.records import BranchRole
from workers.settings.data import with_split
from workers.settings.hub import REVISION_FORM, REVISION_PATTERN
from workers.settings.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Seconds, Section


class SamplingSettings(Section, frozen=True):
    """`rollout.sampling`: further sampling parameters, with vLLM's names and meaning."""

    stop: tuple[str, ...] = ()
    """Strings that end a turn."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; 0: all."""
    min_p: Fraction = 0.0
    """Sample from tokens at least this likely, relative to the most likely one."""
    min_tokens: NonNegativeInt = 0
    """Tokens of a turn before which no stop token is sampled."""
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = field(default_factory=dict)
    """Added to the logits of these token ids, before the temperature."""


class RolloutSettings(Section, frozen=True):
    """`[rollout]`: groups, episodes and their limits."""

    workers: NonNegativeInt = 1
    """Rollout processes that `penstock run` starts."""
    groups_in_flight: PositiveInt = 8
    """Groups that one rollout worker, or one scorer, processes concurrently."""
    group_size: PositiveInt = 8
    """Completions per prompt."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; the trainer divides its logits by the same value. A value other than 1 needs an engine that
    returns processed log-probs: the local one, or vLLM with `--logprobs-mode processed_logprobs`."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """vLLM sampling parameters: `stop`, `top_p`, `top_k`, `min_p`, `min_tokens`, `logit_bias`, for example
    `{ stop = ["</answer>"] }`. All but `stop` change the sampled distribution and not the trainer's, so their ratio is
    not 1 on unchanged weights, and excluded tokens are never learned; the run logs a warning."""
    max_tokens_per_turn: PositiveInt = 512
    """Sampled tokens of one turn, at most what `max_tokens` leaves."""
    max_tokens: PositiveInt = 4096
    """Tokens of a completion, tool results included."""
    max_turns: PositiveInt = 8
    """Turns of the model in one episode."""
    max_tool_calls: PositiveInt = 32
    """Tool calls in one episode; at most half as many, or one, may fail or be malformed."""
    episode_timeout_s: Seconds = 600.0
    """Deadline of an episode's turns, without its tools (`wall_clock`), and again of its tools (`tool_time`)."""
    call_timeout_s: Seconds = 30.0
    """Deadline of one call of user code: `reset`, a tool, `get_reward`, a reward function without a `timeout_s`. Past
    it the completion is invalid; after a tool's timeout the model reads it, and the episode continues."""
    max_snapshot_bytes: PositiveInt = 1_000_000
    """Size of an environment's snapshot; its largest attributes are omitted beyond it. A reward function that reads an
    omitted one fails for that completion alone."""
    resume: bool = True
    """Keep the finished completions of a group on the server until it ends, and the turns of the others if their
    environment can be restored: 8 bytes a token. If the worker dies, the next one goes on with them."""

    @property
    def max_tool_errors(self) -> int:
        """Failed or malformed tool calls in one episode."""
        return max(1, self.max_tool_calls // 2)


class EvalSettings(Section, frozen=True):
    """`[eval]`: held-out prompts, sampled periodically by the run's own workers and never trained on."""

    path: str = ""
    """Prompts with the columns of `[data]`: a file, a folder or a name on the hub, as `data.path`. Without `path` and
    `rows` there is no evaluation."""
    config: str = ""
    """As `data.config`, of the held-out prompts."""
    split: str = ""
    """As `data.split`, of the held-out prompts."""
    revision: Annotated[str, Meta(pattern=REVISION_PATTERN, description=REVISION_FORM)] = ""
    """As `data.revision`, of the held-out prompts."""
    rows: NonNegativeInt = 0
    """Number of held-out problems of each environment, instead of `path`: the first of `rows(split="eval")`, or made
    from seeds that training does not use."""
    every: PositiveInt = 10
    """Policy versions between evaluations; the first and the last version are always evaluated."""
    group_size: PositiveInt = 4
    """Completions per prompt; pass@k is reported for powers of two up to this."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0: greedy, with `group_size = 1`."""

    @property
    def source(self) -> str:
        """Origin of the held-out prompts: a path, or `20 rows of each environment`; empty: nothing is evaluated."""
        return f"{self.rows} rows of each environment" if self.rows else with_split(self.path, self.split)


class AgentSettings(Section, frozen=True):
    """`[agents]`: programs and environments that run their own loop, whose conversation may branch."""

    train: tuple[BranchRole, ...] = (BranchRole.MAIN, BranchRole.SUB, BranchRole.COMPACT, BranchRole.OTHER)
    """Roles of the branches that are trained. The others are sampled, recorded, and bear no loss."""
    weight: Literal["rollout", "tokens"] = "rollout"
    """Weight of a branched rollout in losses that add up tokens. `rollout`: that of the tokens of its main branch,
    however many sub-agents it had; `tokens`: that of all its tokens."""
    max_rollout_tokens: NonNegativeInt = 0
    """Tokens of all branches together, without their prompts; 0: 8 times `rollout.max_tokens`, which holds for each."""
    max_rollout_turns: NonNegativeInt = 0
    """Answers in all branches together; 0: 16 times `rollout.max_turns`, which holds for each."""


class PacingSettings(Section, frozen=True):
    """`[pacing]`: how far rollouts may run ahead of the trainer."""

    max_staleness: NonNegativeInt = 1
    """At most (max_staleness + 1) x (groups per policy version) groups are outstanding."""
    stale_policy: Literal["train", "wait", "cancel"] = "train"
    """Treatment of groups older than `max_staleness` versions. `train`: train them at any age; `wait`: the trainer
    waits for them before they become older; `cancel`: abort them at the engine and start again, at most twice."""
    max_token_age: NonNegativeInt = 0
    """Mask tokens that were sampled more than this many versions ago; 0: no limit."""
