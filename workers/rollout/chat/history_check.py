"""Does a template only ever add, or does it rewrite what was said? Found out at start, on sample conversations.

A template that only adds lets a conversation go on token by token, in one row. One that rewrites earlier turns (drops
their reasoning, or moves the system message) shows the model something else at each turn; the completion then forks
into rows, each exact for what the model saw when it sampled.
"""

from dataclasses import dataclass

from stream.errors import PenstockError
from stream.records import Message
from workers.rollout.chat.renderer import AssistantTurn, ConversationRenderer
from workers.rollout.tool_formats.reasoning import REASONING_TAGS

_CONTEXT_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class HistoryCheck:
    """What a template does to earlier turns.

    Attributes:
        forks: it rewrites them.
        why: in words; where it forks, the first place that differs.
    """

    rewrites_history: bool
    reason: str


def check_history(conversation: ConversationRenderer) -> HistoryCheck:
    """Compare sample conversations with tool calls, rendered as a whole, with the same rendered turn by turn.

    A difference in white space alone does not fork: as many rows as turns would be a high price for a line break.

    Args:
        conversation: the model's template with an environment's tools.

    Raises:
        DataError: the template refuses tool messages.
        PenstockError: it leaves them out, so that no model reads what its tools answered.
    """
    differences = []
    for begun, reasoning in _reasoning_variants(conversation):
        found = _compare_renderings(conversation, begun, reasoning)
        if found is None:
            return HistoryCheck(False, "a conversation rendered as a whole is what the model saw turn by turn")
        differences.append(found)
    spaces = [text for text, in_space in differences if in_space]
    if spaces:
        return HistoryCheck(False, f"only white space differs where the whole is rendered: {spaces[0]}")
    return HistoryCheck(True, differences[0][0])


def _reasoning_variants(conversation: ConversationRenderer) -> list[tuple[str, str]]:
    """How a turn of this model may begin: with what stands in the generation prompt already, and what is sampled.

    A template that knows reasoning is asked to keep it, in any of the usual line breaks. That it gives a turn without
    any an empty block does no harm: such a model always reasons.
    """
    prompt = conversation.render_prompt(_SAMPLES[0][0])[-_CONTEXT_CHARACTERS:]
    for opening, closing in REASONING_TAGS:
        if opening not in conversation.template.source and closing not in conversation.template.source:
            continue
        if closing in prompt:
            break
        endings = [f"Easy.{ending}" for ending in (f"\n{closing}\n\n", f"\n{closing}\n", closing)]
        if opening in prompt:
            return [(begun, ending) for ending in endings for begun in (f"{opening}\n", "")]
        return [("", f"{opening}\n{ending}") for ending in endings]
    return [("", "")]


def _compare_renderings(conversation: ConversationRenderer, begun: str, reasoning: str) -> tuple[str, bool] | None:
    """What differs, and whether only white space does; None where nothing does."""
    in_space = None
    for prompt, rounds in _SAMPLES:
        turns: list[AssistantTurn] = []
        pieces = conversation.render_prompt(prompt)
        for text, results in rounds:
            turns.append(AssistantTurn((), reasoning + text, results, begun))
            whole = conversation.render_whole(prompt, turns)
            if not all(str(result["content"]) in whole for result in results):
                raise PenstockError(
                    f"the chat template of {conversation.template.folder} leaves out tool messages, so that no "
                    "model reads what its tools answered; use a template that knows the role 'tool'"
                )
            try:
                pieces += reasoning + text + conversation.render_continuation(results)
            except PenstockError as error:
                return str(error), False
            if whole != pieces:
                told = _first_difference(whole, pieces)
                if "".join(whole.split()) != "".join(pieces.split()):
                    return told, False
                in_space = in_space or told
    return None if in_space is None else (in_space, True)


def _first_difference(whole: str, pieces: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(whole, pieces, strict=False)) if a != b), None)
    place = min(len(whole), len(pieces)) if place is None else place
    around = slice(max(0, place - _CONTEXT_CHARACTERS), place + _CONTEXT_CHARACTERS)
    return f"first difference at character {place}: the whole says {whole[around]!r}, the turns said {pieces[around]!r}"


def _tool_message(text: str, number: int = 1) -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05}", "content": text}


_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
_ASK: list[Message] = [{"role": "user", "content": "What is 1 + 2?"}]
_SAMPLES: list[tuple[list[Message], list[tuple[str, list[Message]]]]] = [
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
"""What is rendered: several calls, several turns, a system message."""
