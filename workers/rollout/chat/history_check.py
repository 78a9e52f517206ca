"""Check on sample conversations whether a chat template only appends, or rewrites earlier turns.

With a template that only appends, a conversation continues token by token in one row. A template that rewrites earlier
turns (drops their reasoning, or moves the system message) shows the model a different text at each turn; the completion
then gets several rows, each with exactly what the model saw when it sampled.
"""

from dataclasses import dataclass

from stream.errors import PenstockError
from stream.records import Message
from workers.rollout.chat.renderer import AssistantTurn, ConversationRenderer
from workers.rollout.tool_formats.reasoning import REASONING_TAGS

_CONTEXT_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class HistoryCheck:
    """Whether a template rewrites earlier turns.

    Attributes:
        rewrites_history: it does.
        reason: explanation for people; if it rewrites, the first difference.
    """

    rewrites_history: bool
    reason: str


def check_history(
    renderer: ConversationRenderer, *, with_tools: bool = True, with_user_replies: bool = False
) -> HistoryCheck:
    """Compare sample conversations, rendered as a whole, with the same rendered turn by turn.

    A difference in white space alone does not count as rewriting: one row per turn is a high price for a line break.

    Args:
        renderer: the model's template with an environment's tools.
        with_tools: the conversations have tool calls.
        with_user_replies: the environment answers turns with user messages (`respond`). Many templates drop a turn's
            reasoning once a user message follows it, though not after a tool message.

    Raises:
        DataError: the template refuses tool messages.
        PenstockError: it leaves them out, so that no model would read its tools' results.
    """
    differences = []
    samples = _TOOL_SAMPLES * with_tools + _USER_SAMPLES * with_user_replies
    samples += _MIXED_SAMPLES * (with_tools and with_user_replies)
    for open_reasoning, reasoning in reasoning_variants(renderer):
        found = _compare_renderings(renderer, samples, open_reasoning, reasoning)
        if found is None:
            return HistoryCheck(False, "a conversation rendered as a whole is what the model saw turn by turn")
        differences.append(found)
    spaces = [text for text, in_space in differences if in_space]
    if spaces:
        return HistoryCheck(False, f"only white space differs when the whole is rendered: {spaces[0]}")
    return HistoryCheck(True, differences[0][0])


def reasoning_variants(renderer: ConversationRenderer) -> list[tuple[str, str]]:
    """Return how a turn of this model may start: the part in the generation prompt, and the sampled part.

    A template that knows reasoning is tested with it, in each of the usual line breaks. If it writes an empty block
    into a turn without reasoning, that does no harm: such a model always reasons.
    """
    prompt = renderer.render_prompt(_ASK)[-_CONTEXT_CHARACTERS:]
    for opening, closing in REASONING_TAGS:
        if opening not in renderer.template.source and closing not in renderer.template.source:
            continue
        if closing in prompt:
            break
        endings = [f"Easy.{ending}" for ending in (f"\n{closing}\n\n", f"\n{closing}\n", closing)]
        if opening in prompt:
            return [(start, ending) for ending in endings for start in (f"{opening}\n", "")]
        return [("", f"{opening}\n{ending}") for ending in endings]
    return [("", "")]


def _compare_renderings(
    renderer: ConversationRenderer, samples: "list[_Sample]", open_reasoning: str, reasoning: str
) -> tuple[str, bool] | None:
    """Return the first difference, and whether all differences are in white space; None if there is none."""
    in_space = None
    for prompt, rounds in samples:
        if prompt is not _ASK and not renderer.accepts(prompt):
            continue  # a template without system messages
        turns: list[AssistantTurn] = []
        pieces = renderer.render_prompt(prompt)
        for text, replies in rounds:
            turns.append(AssistantTurn((), reasoning + text, replies, open_reasoning))
            whole = renderer.render_whole(prompt, turns)
            if not all(str(reply["content"]) in whole for reply in replies):
                raise PenstockError(
                    f"the chat template of {renderer.template.folder} leaves out {replies[0]['role']} messages, so "
                    f"that the model would not read them; use a template that knows the role {replies[0]['role']!r}"
                )
            try:
                pieces += reasoning + text + renderer.render_continuation(replies)
            except PenstockError as error:
                return str(error), False
            if whole != pieces:
                difference = _first_difference(whole, pieces)
                if "".join(whole.split()) != "".join(pieces.split()):
                    return difference, False
                in_space = in_space or difference
    return None if in_space is None else (in_space, True)


def _first_difference(whole: str, pieces: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(whole, pieces, strict=False)) if a != b), None)
    place = min(len(whole), len(pieces)) if place is None else place
    around = slice(max(0, place - _CONTEXT_CHARACTERS), place + _CONTEXT_CHARACTERS)
    return f"first difference at character {place}: the whole says {whole[around]!r}, the turns said {pieces[around]!r}"


def _tool_message(text: str, number: int = 1) -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05}", "content": text}


def _user_message(text: str) -> Message:
    return {"role": "user", "content": text}


_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
_ASK: list[Message] = [{"role": "user", "content": "What is 1 + 2?"}]
_Sample = tuple[list[Message], list[tuple[str, list[Message]]]]
"""A prompt, and the rounds after it: a turn's text, and the messages that follow it."""
_TOOL_SAMPLES: list[_Sample] = [
    (
        _ASK,
        [
            (_CALL, [_tool_message("3.")]),
            ("Once more.\n" + _CALL, [_tool_message("4."), _tool_message("5.", 2)]),
            (_CALL, [_tool_message("6.")]),
        ],
    ),
    (
        [{"role": "system", "content": "Be brief."}, *_ASK],
        [(f"{_CALL}\n{_CALL}", [_tool_message("7."), _tool_message("8.", 2)])],
    ),
]
"""Conversations with several calls, several turns, and a system message."""
_USER_SAMPLES: list[_Sample] = [
    (
        _ASK,
        [
            ("It is 3.", [_user_message("Are you sure?")]),
            ("Quite sure.", [_user_message("Say it again.")]),
            ("Three.", [_user_message("Thanks.")]),
        ],
    ),
    ([{"role": "system", "content": "Be brief."}, *_ASK], [("3.", [_user_message("And 2 + 2?")])]),
]
"""Conversations in which an environment answers the turns as a user."""
_MIXED_SAMPLES: list[_Sample] = [
    (
        _ASK,
        [(_CALL, [_tool_message("9.")]), ("It is 9.", [_user_message("Check it.")]), (_CALL, [_tool_message("3!")])],
    )
]
