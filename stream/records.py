"""What flows through the pipe.

A prompt is fed, a rollout worker turns it into a group of completions, the scoring stage fills in rewards, the trainer
reads the result::

    Prompt ──► Group(prompt, completions=[Completion(rows=[Row], parts=[Part], reward, ...), ...])

A group is one record with its completions in it, never parallel lists. Token ids and log-probs are raw little-endian
int32 and float32 buffers (`Row.token_ids` is bytes; `Row.tokens` a view of it as integers): half the size of lists, and
a hundred times quicker to read. Fields are only ever added, with defaults; unknown ones are ignored.

Bounds on numbers are checked by whoever decodes a record, so that none comes to a worker that it could not hold.
"""

import sys
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from stream.validity import Reward, RolloutReason, TruncationReason

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
MAX_GROUP_SIZE = 65_536
"""Completions of one prompt, at most: a worker plays them all at the same time."""

SCHEMA = 1
"""Major version of the records below. A reader gives back what is newer than this."""

Message = dict[str, Any]
"""A chat message as chat templates know it: `role`, `content`, and with some `tool_calls`, `tool_call_id`, `name`."""


class Prompt(Struct, kw_only=True):
    """One row of the prompt file, ready to be rolled out.

    Example:
        Prompt(id="train:0:17", messages=[{"role": "user", "content": "2 + 2?"}], fields={"answer": "4"}, group_size=8)
    """

    id: str
    """Deterministic: data set, epoch and row. The group of this prompt bears it in every attempt."""
    messages: list[Message]
    """The conversation before the environment's observation is appended to its last message."""
    is_plain_text: bool = False
    """The prompt column held plain text: reward functions then see prompts and completions as strings."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The row's other columns: keyword arguments of `reset` and of reward functions."""
    environment: str | None = None
    """Name of the environment in the settings; None where there is none."""
    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)] = 1
    """Completions to sample and train; a greedy one, where the estimator asks for it, is one more."""
    epoch: int = 0
    row: int = 0
    """Number of the row in the prompt file, from 0, before shuffling."""
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """The run's seed mixed with the prompt's id; completion i uses seed + i."""
    fed_at: float = 0.0
    """Unix time in seconds."""


class Span(Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a row's `tokens` were sampled by this policy version."""

    version: Count
    start: int
    end: int


class Row(Struct, kw_only=True):
    """One trainable token sequence: exactly what the model saw, and what it sampled.

    Example, a two-turn episode in which the model sampled tokens 0-2 and 5-6, and 3-4 are the tool's answer::

        prompt_ids  [p p p p]
        token_ids   [a a a t t a a]
        sampled     [(0, 3), (5, 7)]
        logprobs    [. . .     . .]      five numbers, for sampled tokens alone
        spans       [Span(7, 0, 3), Span(8, 5, 7)]
    """

    prompt_ids: bytes
    """int32, the tokens before the first sampled one."""
    token_ids: bytes
    """int32, all tokens after the prompt, sampled or not."""
    sampled_ranges: list[tuple[int, int]] = field(default_factory=list)
    """Half-open ranges of `token_ids` that the policy sampled, ascending. They and only they bear loss."""
    logprobs: bytes = b""
    """float32, the engine's log-prob of each sampled token at the time it was sampled; packed in the ranges' order."""
    spans: list[Span] = field(default_factory=list)
    """Which policy version sampled which tokens; together they cover `sampled` exactly."""

    def __post_init__(self) -> None:
        """Refuse buffers that cannot be what they say, so that junk never reaches a worker as a row."""
        if len(self.prompt_ids) % 4 or len(self.token_ids) % 4 or len(self.logprobs) != 4 * self.sampled_count:
            raise ValueError("a row's buffers do not fit together: ids are int32, one float32 log-prob a sampled token")
        length = len(self.token_ids) // 4
        last = 0
        for start, end in self.sampled_ranges:
            if not last <= start < end <= length:
                raise ValueError(f"sampled ranges do not ascend within the row's {length} tokens")
            last = end
        if not all(0 <= span.start <= span.end <= length for span in self.spans):
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
    """One measured, or unmeasured, part of a completion's reward."""

    name: str
    """`env` (or `env.KEY` for a mapping), or the reward function's name."""
    reward: Reward
    weight: Finite = 1.0
    turn: int | None = None
    """The turn of the model, from 0, where rewards come by turn; None where it is the whole completion's."""


class Failure(Struct, frozen=True, kw_only=True):
    """The episode failed: its tokens are no sample of what the policy does."""

    reason: RolloutReason
    detail: str = ""


class Completion(Struct, kw_only=True):
    """One conversation: what was sampled, what happened, what it was worth."""

    index: int
    """Position within the group, from 0; reaches `reset` as `completion_index`. A greedy one comes last."""
    greedy: bool = False
    """Sampled at temperature 0 as remax's baseline; never trained, never in a group statistic."""
    rows: list[Row] = field(default_factory=list)
    """Usually one. More where a chat template rewrites history; none where the episode failed before sampling."""
    prompt_messages: list[Message] = field(default_factory=list)
    """The prompt as this completion saw it, observation included."""
    messages: list[Message] = field(default_factory=list)
    """What followed, for people and reward functions: assistant turns and tool results."""
    failure: Failure | None = None
    truncated: TruncationReason | None = None
    parts: list[RewardPart] = field(default_factory=list)
    reward: Reward | None = None
    """The parts merged; None until the scoring stage has spoken."""
    snapshot: bytes | None = None
    """The environment's attributes at the end of the episode, frozen (`envs.snapshot`)."""
    turns: Count = 0
    tool_calls: Count = 0
    tool_errors: Count = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by activity: `reset`, `engine`, `tools`, `reward`, `total`."""


class Group(Struct, kw_only=True):
    """All completions of one prompt, the greedy one included where there is one."""

    prompt: Prompt
    completions: list[Completion]
    attempt: int = 0
    """0 at the first try; counts deliveries of the prompt."""
    cancelled_attempts_s: list[float] = field(default_factory=list)
    """Seconds that each attempt before this one had run when it was cancelled for its age."""
    evaluated_version: Count | None = None
    """Of an evaluation: the policy version that it is of; None for what is to be trained."""
    worker: str = ""
    claimed_at: float = 0.0
    rolled_out_at: float = 0.0
    scored_at: float = 0.0
    """Unix times in seconds."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of this group; None if nothing was sampled."""
        versions = [s.version for c in self.completions for r in c.rows for s in r.spans]
        return min(versions, default=None)
