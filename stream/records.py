"""The records in the streams.

A prompt is fed, a rollout worker turns it into a group of completions, the scoring stage fills in rewards, the trainer
reads the result::

    Prompt ──► Group(prompt, completions=[Completion(rows=[Row], parts=[RewardPart], reward, ...), ...])

A group is one record with its completions in it, never parallel lists. Token ids and log-probs are raw little-endian
int32 and float32 buffers (`Row.token_ids` is bytes; `Row.tokens` is a view of it as integers): half the size of
lists, and a hundred times faster to read. New fields always have defaults, and unknown fields are ignored.

Decoding checks the bounds of numbers, so a worker never gets a value that it cannot handle.
"""

import sys
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from stream.causes import ErrorCause
from stream.errors import RecordError
from stream.validity import Reward, RolloutReason, TruncationReason

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
MAX_ACTIVITY_TIMES = 1000
"""Activity times in the record of one completion; later ones are left out."""
MAX_GROUP_SIZE = 65_536
"""The most completions of one prompt; a worker runs them all at the same time."""

SCHEMA = 1
"""Major version of the records below. A reader gives back records of a newer version."""

Message = dict[str, Any]
"""A chat message as chat templates use it: `role`, `content`, and optionally `tool_calls`, `tool_call_id`, `name`."""


class Prompt(Struct, kw_only=True):
    """One row of the prompt file, ready to be rolled out.

    Example:
        Prompt(id="train:0:17", messages=[{"role": "user", "content": "2 + 2?"}], fields={"answer": "4"}, group_size=8)
    """

    id: str
    """Made from dataset, epoch and row. The group of the prompt has the same id in every attempt."""
    messages: list[Message]
    """The conversation before the environment's observation is appended to its last message."""
    is_plain_text: bool = False
    """The prompt column was plain text; reward functions then get prompts and completions as strings."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The row's other columns: keyword arguments of `reset` and of reward functions."""
    environment: str | None = None
    """Name of the environment in the settings; None if there is none."""
    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)] = 1
    """Completions to sample and train. A greedy completion, if the estimator needs one, is additional."""
    epoch: int = 0
    """How often the data set was fed before."""
    row: int = 0
    """Index of the row in the prompt file, from 0, before shuffling."""
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """The run's seed mixed with the prompt's id; completion i uses seed + i."""
    fed_at: float = 0.0
    """Unix time in seconds, by the server's clock, at which the prompt entered its stage; set when it is rolled out."""


class Span(Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a row's `tokens` were sampled by this policy version."""

    version: Count
    """The policy version; 0 is the initial model."""
    start: int
    """Index of the first token in `token_ids`."""
    end: int
    """Index after the last token."""


class Row(Struct, kw_only=True):
    """One trainable token sequence: exactly what the model saw and sampled.

    Example, a two-turn episode in which the model sampled tokens 0-2 and 5-6, and 3-4 are the tool's answer::

        prompt_ids  [p p p p]
        token_ids   [a a a t t a a]
        sampled     [(0, 3), (5, 7)]
        logprobs    [. . .     . .]      five numbers, for sampled tokens only
        spans       [Span(7, 0, 3), Span(8, 5, 7)]
    """

    prompt_ids: bytes
    """int32: the tokens before the first sampled one."""
    token_ids: bytes
    """int32: all tokens after the prompt, sampled or not."""
    sampled_ranges: list[tuple[int, int]] = field(default_factory=list)
    """Half-open ranges of `token_ids` that the policy sampled, ascending. Only they have loss."""
    logprobs: bytes = b""
    """float32: the engine's log-prob of each sampled token when it was sampled, in the order of the ranges."""
    spans: list[Span] = field(default_factory=list)
    """Which policy version sampled which tokens; together they cover `sampled` exactly."""

    def __post_init__(self) -> None:
        """Check that buffers, ranges and spans fit together, so that a worker never gets an inconsistent row."""
        length = len(self.token_ids) // 4
        last = sampled = 0
        for start, end in self.sampled_ranges:
            if not last <= start < end <= length:
                raise ValueError(f"sampled ranges do not ascend within the row's {length} tokens")
            sampled += end - start
            last = end
        if len(self.prompt_ids) % 4 or len(self.token_ids) % 4 or len(self.logprobs) != 4 * sampled:
            raise ValueError(
                "a row's buffers do not fit together: ids are int32, and each sampled token has one float32 log-prob"
            )
        for span in self.spans:
            if not 0 <= span.start <= span.end <= length:
                raise ValueError(f"a policy version's span is not within the row's {length} tokens")

    @property
    def prompt(self) -> "memoryview[int]":
        """`prompt_ids` as integers."""
        return memoryview(self.prompt_ids).cast("i")

    @property
    def tokens(self) -> "memoryview[int]":
        """`token_ids` as integers."""
        return memoryview(self.token_ids).cast("i")

    @property
    def sampled_logprobs(self) -> "memoryview[float]":
        """`logprobs` as floats, one for each sampled token."""
        return memoryview(self.logprobs).cast("f")

    @property
    def sampled_count(self) -> int:
        """Number of sampled tokens."""
        return sum(end - start for start, end in self.sampled_ranges)


class RewardPart(Struct, kw_only=True):
    """One part of a completion's reward, measured or not."""

    name: str
    """`env` (or `env.KEY` for a mapping), or the reward function's name."""
    reward: Reward
    """The measured value, or why there is none."""
    weight: Finite = 1.0
    """Factor of the part in the completion's reward."""
    turn: int | None = None
    """The model's turn, from 0, for a reward per turn; None for a reward of the whole completion."""


class Failure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The episode failed, so its tokens are not a sample of the policy's behaviour."""

    reason: RolloutReason
    """Why the episode failed."""
    detail: str = ""
    """The error's text."""
    cause: ErrorCause | None = None
    """Where the environment's code raised or hung, if it did."""


class ToolRun(Struct, frozen=True, array_like=True):
    """How one tool call went; kept for people (`penstock show`)."""

    seconds: float
    """Wall time of the call, waiting for a thread included and for other tools of the turn not; 0 if the call could not
    be made."""
    is_error: bool = False
    """The model read an error."""
    cause: ErrorCause | None = None
    """Where the tool raised or hung; None if it did not, or if the call was malformed."""


class ActivityTime(Struct, frozen=True, array_like=True):
    """When a completion did something; kept for people (`penstock trace`)."""

    activity: str
    """As in `Completion.seconds`; `engine` and `tools` have one for each turn."""
    began_at: float
    """Unix time in seconds."""
    seconds: float
    """How long it went on."""


class BranchRole(StrEnum):
    """What a branch of an agent's conversation is for."""

    MAIN = "main"  # the task itself, also after its history was compacted
    SUB = "sub"  # a sub-agent's
    COMPACT = "compact"  # a summary of the history, with which a later branch starts
    SIDE = "side"  # a call beside the task, such as for a title, whose answer no later request holds
    OTHER = "other"  # none of these


class DiscardReason(StrEnum):
    """Why a branch is not trained although the rollout is."""

    ROLE = "role"  # `agents.train` does not name its role
    PROGRAM = "program"  # the program asked for it, by the header X-Penstock-Train
    SUPERSEDED = "superseded"  # another answer to the same context was continued, and this one was not


class Branch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of an agent's conversation, in which every request continues the one before.

    Example: a program has three turns, asks for a summary of the first two, and goes on with the summary::

        branches[0]  role main, turns 3, rows [0]
        branches[1]  role compact, turns 1, rows [1], parent 0, after_turn 2
        branches[2]  role main, turns 4, rows [2], parent 1
    """

    role: BranchRole
    """What it is for."""
    turns: Count = 0
    """Answers of the model."""
    limited: TruncationReason | None = None
    """Which limit had the last word in it; None if none had."""
    parent: int | None = None
    """Position in `Completion.branches` of the branch that it comes from; None if it comes from none."""
    after_turn: int | None = None
    """Number of the parent's turns that it starts with; None if it starts with none of them."""
    name: str = ""
    """The program's own name for it."""
    rows: tuple[int, ...] = ()
    """Positions in `Completion.rows`, in the order of the turns."""
    rewritten: tuple[str, ...] = ()
    """For each row after the first, who rewrote the history before it: `template` or `program`."""
    answers: tuple[int, ...] = ()
    """Positions in `Completion.messages` of its answers, in the order of the turns. What the program sent for a turn
    stands directly before the answer. Empty: not recorded."""
    discarded: DiscardReason | None = None
    """Why its rows bear no loss; None if they do."""


class Completion(Struct, kw_only=True):
    """One conversation: sampled tokens, messages and reward."""

    index: int
    """Position within the group, from 0; reaches `reset` as `completion_index`. A greedy one comes last."""
    greedy: bool = False
    """Sampled at temperature 0 as the baseline of ReMax; not trained, and not in group statistics."""
    rows: list[Row] = field(default_factory=list)
    """Usually one. Several if a chat template rewrites history, or an agent's conversation branches; none if the
    episode failed before sampling."""
    branches: list[Branch] = field(default_factory=list)
    """Of an agent's conversation, in the order of their first turns; each row is of one of them. Empty: a single line,
    in which everything is trained."""
    prompt_messages: list[Message] = field(default_factory=list)
    """The prompt as this completion saw it, including the environment's observation."""
    messages: list[Message] = field(default_factory=list)
    """What followed: assistant turns and tool results, for people and reward functions."""
    failure: Failure | None = None
    """Why the episode failed; None if it did not. A failed episode is not trained."""
    truncated: TruncationReason | None = None
    """Which limit ended the episode; None if the model or the environment ended it."""
    parts: list[RewardPart] = field(default_factory=list)
    """What each reward function, or turn of the environment, contributed."""
    reward: Reward | None = None
    """The merged parts; None before scoring."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values that reward functions passed to `log_extra`, by column."""
    snapshot: bytes | None = None
    """The environment's attributes at the end of the episode, frozen (`envs.snapshot`)."""
    turns: Count = 0
    """Answers of the model."""
    tool_calls: Count = 0
    """Calls that the model made, malformed ones included."""
    tool_errors: Count = 0
    """Calls whose error the model read."""
    tool_runs: list[ToolRun] = field(default_factory=list)
    """One for each tool message of `messages`, in their order; empty if the environment ran its own loop."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by activity: `reset`, `engine`, `tools`, `reward`, `total`."""
    activity_times: list[ActivityTime] = field(default_factory=list)
    """When each of them went on, in the order of their ends; at most `MAX_ACTIVITY_TIMES`."""


class TrainedRow(Struct, frozen=True, array_like=True):
    """What a step did with the sampled tokens of one row; arrays are in the order of the row's `sampled_ranges`.

    Example, five sampled tokens, of which a rejection rule took out the third::

        loss_mask             01 01 00 01 01
        advantages            0.5                       one value: all tokens share it
        logprob_differences   0.01 -0.2 4.1 0.0 0.03
        rejected_by           00 00 01 00 00            01 is rules[0]
        rules                 ["token_k1"]
    """

    loss_mask: bytes = b""
    """One byte for each sampled token: 1 if it bears loss. Empty: all of them do."""
    advantages: bytes = b""
    """float32, little-endian: the advantage of each sampled token, or one value that they share. Meaningful where the
    token bears loss; empty if none does."""
    logprob_differences: bytes = b""
    """float32, little-endian: the trainer's log-prob before the step minus the engine's, in nats; NaN where the trainer
    did not compute it. Empty: nowhere."""
    rejected_by: bytes = b""
    """One byte for each sampled token: 0, or 1 + the position in `rules` of the rule that rejected it. Empty: none was
    rejected."""
    rules: tuple[str, ...] = ()
    """Names of the rules that rejected tokens of this row."""


class TrainedCompletion(Struct, frozen=True, array_like=True):
    """What a step did with one completion; stored in the archive beside its group, its rows in `trained_tokens/`."""

    state: str
    """`valid`, or why the completion bears no loss, as in the metrics `rows/*`."""
    advantage: Finite | None
    """The mean over the completion's loss tokens; None without any."""
    loss_tokens: Count
    """Tokens that bear loss: all sampled ones, unless the completion or some of its tokens were masked out."""
    rows: tuple[TrainedRow, ...] = ()
    """One for each row of the completion; empty if the tokens of the step are not kept."""


class Group(Struct, kw_only=True):
    """All completions of one prompt, including the greedy one if there is one."""

    prompt: Prompt
    """The prompt as it was fed."""
    completions: list[Completion]
    """In the order of `Completion.index`."""
    attempt: int = 0
    """How often the prompt was delivered before; 0 at the first attempt."""
    cancelled_attempts_s: list[float] = field(default_factory=list)
    """Run time in seconds of each earlier attempt that was cancelled as stale."""
    evaluated_version: Count | None = None
    """For an evaluation: the evaluated policy version. None for a group to be trained."""
    logged_metrics: dict[str, list[float]] = field(default_factory=dict)
    """Numbers that reward functions passed to `log_metric`, by name."""
    worker: str = ""
    """Name of the rollout worker."""
    claimed_at: float = 0.0
    """Unix time in seconds, like the three below, at which the rollout worker claimed the prompt."""
    rolled_out_at: float = 0.0
    """When its last completion ended."""
    score_claimed_at: float = 0.0
    """When a scorer claimed the group."""
    scored_at: float = 0.0
    """When its rewards were complete."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of this group; None if nothing was sampled."""
        versions = [s.version for c in self.completions for r in c.rows for s in r.spans]
        return min(versions, default=None)

    def set_scores(self, scores: "Scores") -> None:
        """Set what scoring has found.

        Raises:
            RecordError: the scores are of another number of completions.
        """
        if len(scores.completions) != len(self.completions):
            raise RecordError(f"scores of {len(scores.completions)} completions for a group of {len(self.completions)}")
        for completion, found in zip(self.completions, scores.completions, strict=True):
            completion.parts, completion.reward, completion.extra = found.parts, found.reward, found.extra
        self.logged_metrics = scores.logged_metrics
        self.score_claimed_at, self.scored_at = scores.score_claimed_at, scores.scored_at


class CompletionScores(Struct, kw_only=True, omit_defaults=True):
    """What scoring sets in one completion; see there."""

    parts: list[RewardPart] = field(default_factory=list)
    reward: Reward | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Scores(Struct, kw_only=True):
    """What scoring adds to a group; the scored group is the group of the rollout with its scores.

    The rollout's record stays on the server, so a scorer does not send back the tokens that it has read.
    """

    completions: list[CompletionScores]
    """In the order of the group's completions."""
    logged_metrics: dict[str, list[float]] = field(default_factory=dict)
    score_claimed_at: float = 0.0
    scored_at: float = 0.0

    @classmethod
    def of_group(cls, group: Group) -> "Scores":
        """Return the scores of a scored group."""
        return cls(
            completions=[CompletionScores(parts=c.parts, reward=c.reward, extra=c.extra) for c in group.completions],
            logged_metrics=group.logged_metrics,
            score_claimed_at=group.score_claimed_at,
            scored_at=group.scored_at,
        )
