"""How completions are sampled, for training and for evaluation, and how far they may run ahead."""

from typing import Annotated, Literal

from msgspec import Meta, field

from workers.settings.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Seconds, Section


class Rollout(Section, frozen=True):
    """`[rollout]`: groups, episodes, and their limits."""

    workers: NonNegativeInt = 1
    """Processes that `penstock run` starts."""
    groups_in_flight: PositiveInt = 8
    """Groups that one worker works on at once."""
    group_size: PositiveInt = 8
    """Completions to a prompt."""
    temperature: NonNegativeFloat = 1.0
    """Of sampling; the trainer divides its logits by the same. Other than 1 it takes an engine whose log-probs are
    processed: the local one, or vLLM with `--logprobs-mode processed_logprobs`."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn; the token that completes one of them is the last. The engine's own end of turn always
    does."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that have this mass together; 1: from all. Takes `restricted`."""
    top_k: NonNegativeInt = 0
    """Sample from so many of the likeliest tokens; 0: from all. Takes `restricted`."""
    min_p: Fraction = 0.0
    """Sample from tokens that are at least so likely, in units of the likeliest; 0: from all. Takes `restricted`."""
    min_tokens: NonNegativeInt = 0
    """Of a turn, before which no stop token can be sampled. Takes `restricted`."""
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = field(default_factory=dict)
    """Added to the logits of these token ids, before the temperature. Takes `restricted`."""
    restricted: bool = False
    """Allow the five settings above, which change the distribution that is sampled from. The trainer's is of the whole
    vocabulary all the same, so on unchanged weights its ratio to the engine's is not 1: with `top_p`, `top_k` and
    `min_p` it is the mass of the tokens that were left, and nothing is ever learned of the others."""
    max_tokens_per_turn: PositiveInt = 512
    """Sampled tokens of one turn."""
    max_tokens: PositiveInt = 4096
    """Tokens of a completion, tool results included."""
    max_turns: PositiveInt = 8
    """Turns of the model."""
    max_tool_calls: PositiveInt = 32
    """Calls in one episode."""
    max_tool_errors: PositiveInt = 16
    """Failed or malformed calls in one episode."""
    wall_clock_s: Seconds = 600.0
    """Of one episode, resets and tools included."""
    reset_timeout_s: Seconds = 30.0
    """For `reset`; past it the completion is invalid."""
    tool_timeout_s: Seconds = 30.0
    """For each tool call; past it the model reads that the tool timed out."""
    reward_timeout_s: Seconds = 30.0
    """For `get_reward`, and for each call of a reward function wherever it runs."""
    max_snapshot_bytes: PositiveInt = 1_000_000
    """Of one frozen environment; the largest attributes are left out beyond it."""
    endpoint_host: str = "127.0.0.1"
    """This worker's address as environments that lead their episodes themselves (verifiers' servers) reach it: they ask
    there for every turn of the model."""
    partial: bool = False
    """Finished completions of an unfinished group are kept on the server, whatever became of them: where its worker
    dies, or is stopped, the next one plays only the others. For long episodes; costs memory of the server."""


class Eval(Section, frozen=True):
    """`[eval]`: held-out prompts, sampled every so often by the run's own workers, never trained on."""

    path: str = ""
    """A prompt file with the columns of `[data]`; empty: nothing is evaluated."""
    every: PositiveInt = 10
    """Policy versions from one evaluation to the next; the first version and the last are evaluated besides."""
    group_size: PositiveInt = 4
    """Completions to a prompt; pass@k is told for powers of two up to it."""
    temperature: NonNegativeFloat = 1.0
    """Of sampling; 0 is greedy, with `group_size = 1`."""
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.25
    """Of each worker's `groups_in_flight`, while an evaluation is under way; one group at least."""
    hold_s: Seconds = 300.0
    """The next version is published only when an evaluation has been sampled, or when nothing of it has come for so
    long. Longer than an episode, and less than `guard.stall_s`."""


class Pacing(Section, frozen=True):
    """`[pacing]`: how far rollouts may run ahead of the trainer."""

    max_staleness: NonNegativeInt = 1
    """Outstanding groups are bounded by (max_staleness + 1) x groups per policy version."""
    late: Literal["train", "wait", "cancel"] = "train"
    """What becomes of groups that take longer than `max_staleness` versions. `train`: nothing, any age is trained.
    `wait`: the trainer waits for them. `cancel`: they are aborted at the engine and begun anew, at most twice; then as
    `train`."""
    straggler_timeout_s: Seconds = 60.0
    """`late = "wait"`: the trainer goes on without them when none has come for so long."""
    max_token_age: NonNegativeInt = 0
    """Tokens sampled more versions ago are masked and counted; 0: any age is trained."""
