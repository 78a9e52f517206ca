"""A completion in words, for every screen: conversation, tool calls, reward, its end, and what the step did with it.

`conversation` returns messages, which a page lays out; `paragraphs` returns everything as label and text, which a
terminal prints.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct, field

from stream.records import Completion, Message, RewardPart, Row, ToolRun, TrainedCompletion
from stream.validity import DropReason, Measured, Reward, Unmeasured
from stream.wording import format_duration, quantity
from workers.runs.branches import BranchView, branch_lines, describe_branches, message_branches
from workers.runs.tokens import logprob_differences, rejected_tokens

MAX_CHARACTERS: Final = 2000
"""Length of a message on a page; the middle of a longer one is loaded when it is asked for."""
_WHY_DROPPED: Final[dict[str, str]] = {
    DropReason.NO_VALID_ROW: "No completion is valid.",
    DropReason.MIN_VALID_ROWS: "Fewer completions are valid than filter.min_valid_rows requires.",
    DropReason.ZERO_VARIANCE: "All valid completions have the same reward, so none is better than another "
    "(filter.zero_variance).",
    DropReason.SINGLETON: 'Only one completion is valid (algorithm.single_sample_policy = "drop").',
    DropReason.NO_BASELINE: "The greedy completion, whose reward is the baseline, has none.",
    DropReason.DIFFICULTY: "The mean reward is outside filter.mean_reward_range.",
    DropReason.ADVANTAGE: "The largest advantage is outside filter.advantage_range.",
    DropReason.GRADIENT_NOT_FINITE: "The gradient of its step was not finite, so the step was skipped.",
}

DecodeRow = Callable[[Row], tuple[str, str]]
"""Returns the text of a row's prompt, and of the tokens after it."""


class Paragraph(NamedTuple):
    """A part of a transcript."""

    label: str
    """The speaker, or what the paragraph is about."""
    text: str


class ConversationMessage(Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    number: int = 0
    """Position in the conversation, from 0; the prompt's messages come first."""
    role: str
    text: str
    reasoning: str = ""
    calls: list[str] = field(default_factory=list)
    """Tool calls as in Python."""
    tool: str = ""
    """Name of the tool whose result this is."""
    seconds: float | None = None
    is_error: bool = False
    cause: str = ""
    """Where the tool raised or hung."""
    rewards: list[str] = field(default_factory=list)
    """Parts of the reward for this turn."""
    turn: int | None = None
    """Number of the model's turn in its branch, from 1; None for what was not sampled."""
    branch: int | None = None
    """Position in `Completion.branches` of the branch that it is of; None without branches."""
    is_prompt: bool = False
    omitted: int = 0
    """Characters of `text` that are left out after `head`."""
    tail: str = ""
    """The end of a text whose middle is left out."""


def conversation(completion: Completion) -> list[ConversationMessage]:
    """Return all messages of a completion, whole; with branches, one branch after the other, as in their tree."""
    branches = message_branches(completion)
    places = branches or [(None, None)] * len(completion.messages)
    first = branches[0][0] if branches else None
    shown = [_shown(message, is_prompt=True, branch=first) for message in completion.prompt_messages]
    runs = iter(completion.tool_runs)
    names = call_names(completion.messages)
    answers = 0
    for message, (branch, turn) in zip(completion.messages, places, strict=True):
        role = message.get("role")
        if role == "tool":
            name = str(message.get("name") or names.get(str(message.get("tool_call_id")), ""))
            shown.append(_tool_result(message, name, next(runs, None), branch))
        elif role == "assistant" and (turn is not None or not branches):  # else the program made it up, or cut it
            rewards = [describe_part(part) for part in completion.parts if part.turn == answers]
            answers += 1
            shown.append(_shown(message, turn=turn or answers, rewards=rewards, branch=branch))
        else:
            shown.append(_shown(message, branch=branch))
    if branches:
        order = {view.number: at for at, view in enumerate(describe_branches(completion))}
        shown.sort(key=lambda message: order[message.branch or 0])
    return [msgspec.structs.replace(message, number=number) for number, message in enumerate(shown)]


def paragraphs(
    completion: Completion,
    *,
    decode: DecodeRow | None = None,
    state: str = "",
    outcome: str = "",
    trained: TrainedCompletion | None = None,
) -> list[Paragraph]:
    """Return a completion as paragraphs: conversation, reward, why it is invalid, how it ended, and what followed.

    Args:
        completion: the completion.
        decode: turns tokens to text, for completions without messages.
        state: the rendered final state of its environment, or why it cannot be rendered.
        outcome: of the group: `trained`, `dropped:REASON` or `unfinished`; empty: it is no group of a run.
        trained: what the step did with the completion.
    """
    branches = describe_branches(completion, trained)
    if not completion.messages and decode is not None and completion.rows:
        shown = [
            Paragraph(label, text)
            for row in completion.rows
            for label, text in zip(("prompt", "sampled"), decode(row), strict=True)
        ]
    else:
        shown = list(_message_paragraphs(completion, branches))
    if branches:
        shown.insert(0, Paragraph("branches", "\n".join(branch_lines(branches))))
    shown.append(
        Paragraph("reward", "\n".join([describe_reward(completion.reward), *map(_part_text, completion.parts)]))
    )
    if why := invalid_reason(completion):
        shown.append(Paragraph("invalid", why))
    shown.append(Paragraph("ended", describe_end(completion)))
    if state:
        shown.append(Paragraph("state", state))
    if text := describe_outcome(outcome) or _trained_text(completion, trained):
        shown.append(Paragraph("trainer", text))
    return shown


def describe_end(completion: Completion) -> str:
    """Describe how an episode ended, and what it used, in one line."""
    end = f"truncated ({completion.truncated})" if completion.truncated else "finished"
    if completion.failure is not None:
        end = f"failed ({completion.failure.reason})"
    calls = completion.tool_calls
    errors = f" ({quantity(completion.tool_errors, 'error')})" if completion.tool_errors else ""
    sampled = sum(row.sampled_count for row in completion.rows)
    used = [
        quantity(completion.turns, "turn"),
        *([f"{quantity(calls, 'tool call')}{errors}"] if calls or errors else []),
        *([f"{quantity(sampled, 'token')} sampled"] if completion.rows or not completion.turns else []),
        *([versions] if (versions := describe_versions(completion)) else []),
        *([format_duration(total)] if (total := completion.seconds.get("total")) else []),
    ]
    return f"{end}; {', '.join(used)}"


def describe_versions(completion: Completion) -> str:
    """Return the policy versions that sampled the completion: `version 7`, `versions 7-8`; empty without any."""
    versions = [span.version for row in completion.rows for span in row.spans]
    if not versions:
        return ""
    low, high = min(versions), max(versions)
    return f"version {low}" if low == high else f"versions {low}-{high}"


def describe_reward(reward: Reward | None) -> str:
    """Describe a reward in a few words: `0.5`, `unmeasured (timeout)`, `not scored`."""
    match reward:
        case None:
            return "not scored"
        case Measured(value, reason):
            return f"{value:g}" + (f" (could not be judged: {reason})" if reason else "")
        case Unmeasured(reason):
            return f"unmeasured ({reason})"


def describe_part(part: RewardPart) -> str:
    """Return name, value and weight of a part of a reward, and why it is not measured."""
    return _part_text(part, with_turn=False)


def invalid_reason(completion: Completion) -> str:
    """Return why a completion is invalid, with the detail; empty if it is valid, or not scored yet."""
    if (failure := completion.failure) is not None:
        return f"the episode failed ({failure.reason})" + (f": {failure.detail}" if failure.detail else "")
    if isinstance(reward := completion.reward, Unmeasured):
        return f"the reward is unmeasured ({reward.reason})" + (f": {reward.detail}" if reward.detail else "")
    return ""


def describe_outcome(outcome: str) -> str:
    """Return why a group ended without being trained on, as a sentence; empty if there is no more to say.

    Args:
        outcome: `trained`, `dropped:REASON` or `unfinished`.
    """
    return _WHY_DROPPED.get(outcome.removeprefix("dropped:"), "")


def shorten(text: str, max_characters: int) -> str:
    """Leave out the middle of a text that is longer than `max_characters`."""
    if len(text) <= max_characters:
        return text
    tail = max_characters // 3
    head = max_characters - tail
    return f"{text[:head]} … {len(text) - head - tail:,} characters … {text[-tail:]}"


def shorten_message(message: ConversationMessage) -> ConversationMessage:
    """Leave out the middle of a long text."""
    text = message.text
    if len(text) <= MAX_CHARACTERS:
        return message
    head, tail = 2 * MAX_CHARACTERS // 3, MAX_CHARACTERS // 3
    return msgspec.structs.replace(message, text=text[:head], omitted=len(text) - head - tail, tail=text[-tail:])


def format_call(call: dict[str, Any]) -> str:
    """Format one entry of `tool_calls` like a call in Python: `add(a=2, b="x")`."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, dict):
        inside = ", ".join(f"{name}={_as_json(value)}" for name, value in arguments.items())
    else:
        inside = str(arguments)
    return f"{function.get('name', '?')}({inside})"


def content_text(content: object) -> str:
    """Return a message's content as text; a part that is not text becomes a note such as `[image_url]`."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return _as_json(content)
    return "\n".join(
        str(part["text"]) if isinstance(part, dict) and isinstance(part.get("text"), str) else f"[{_part_kind(part)}]"
        for part in content
    )


def call_names(messages: Iterable[Message]) -> dict[str, str]:
    """Return the tools' names by the ids of their calls."""
    calls = (call for m in messages for call in m.get("tool_calls") or [] if isinstance(call, dict))
    return {str(call.get("id")): str(call.get("function", call).get("name", "")) for call in calls if call.get("id")}


def _shown(
    message: Message,
    *,
    turn: int | None = None,
    rewards: Sequence[str] = (),
    is_prompt: bool = False,
    branch: int | None = None,
) -> ConversationMessage:
    calls = [format_call(call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    return ConversationMessage(
        role=str(message.get("role", "?")),
        text=content_text(message.get("content")),
        reasoning=content_text(message.get("reasoning_content")),
        calls=calls,
        rewards=list(rewards),
        turn=turn,
        branch=branch,
        is_prompt=is_prompt,
    )


def _tool_result(message: Message, name: str, run: ToolRun | None, branch: int | None) -> ConversationMessage:
    return ConversationMessage(
        role="tool",
        text=content_text(message.get("content")),
        tool=name,
        seconds=run.seconds if run is not None and run.seconds else None,
        is_error=run is not None and run.is_error,
        cause=run.cause.short_headline if run is not None and run.cause is not None else "",
        branch=branch,
    )


def _message_paragraphs(completion: Completion, branches: Sequence[BranchView]) -> Iterator[Paragraph]:
    """Yield the messages as text; each branch has a heading, and its answers have the numbers of their turns."""
    titles = {view.number: view.title for view in branches}
    branch = None
    for message in conversation(completion):
        if message.branch is not None and message.branch != branch:
            yield Paragraph("branch", titles[message.branch])
        branch = message.branch
        yield _message_paragraph(message)


def _message_paragraph(message: ConversationMessage) -> Paragraph:
    """Return a message as text, with its tool calls, or with name and duration of the call that it answers."""
    label = "tool error" if message.is_error else message.role
    about = [message.tool] if message.tool else []
    about += [format_duration(message.seconds)] if message.seconds is not None else []
    if message.role == "tool":
        return Paragraph(label, message.text + (f"  ← {', '.join(about)}" if about else ""))
    text = "\n".join(filter(None, [message.reasoning, message.text]))
    if message.branch is not None and message.turn is not None:
        text = f"{text}  ← turn {message.turn}".lstrip()
    calls = [f"→ {call}" for call in message.calls]
    return Paragraph(label, "\n".join([*([text] if text or not calls else []), *calls]))


def _trained_text(completion: Completion, trained: TrainedCompletion | None) -> str:
    """Return what the step did with the completion's tokens; empty if that is not recorded."""
    if trained is None or not trained.rows:
        return ""
    sampled = sum(row.sampled_count for row in completion.rows)
    parts = [f"loss on {trained.loss_tokens:,} of {sampled:,} sampled tokens"]
    parts += [f"{count:,} rejected by {rule}" for rule, count in rejected_tokens(trained).items()]
    if differences := logprob_differences(trained):
        mean, largest = sum(differences) / len(differences), max(differences, key=abs)
        parts.append(f"log-prob against the engine's {mean:+.2g} on average, {largest:+.2g} at most")
    return "; ".join(parts)


def _part_text(part: RewardPart, *, with_turn: bool = True) -> str:
    weight = "" if part.weight == 1 else f", weight {part.weight:g}"
    turn = "" if part.turn is None or not with_turn else f" (turn {part.turn + 1})"
    detail = getattr(part.reward, "detail", "")
    return f"{part.name}{turn} {describe_reward(part.reward)}{weight}" + (f": {detail}" if detail else "")


def _part_kind(part: object) -> str:
    return str(part.get("type", "part")) if isinstance(part, dict) else "part"


def _as_json(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return str(value)
