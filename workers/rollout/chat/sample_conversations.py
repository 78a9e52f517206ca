"""Sample conversations on which a template is tried before it renders a real one.

Their results hold every text in the template's source, which it might look for, and their number of turns exceeds every
small number in it, which it might compare with.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice, repeat
from typing import Final

from stream.records import Message
from workers.rollout.chat.continuation_frames import numbers_in, sample_contents
from workers.rollout.chat.renderer import AssistantTurn, ConversationRenderer

_PLAIN_TURNS: Final = 4
"""Turns before the first special content, which may change how they are rendered."""
_SPECIAL_TURNS: Final = 12
"""Turns of a conversation with special contents, of which it holds as many."""
_MAX_TURNS: Final = 66
"""Templates with larger numbers do not count turns with them."""
_ASK: Final[list[Message]] = [{"role": "user", "content": "What is 1 + 2?"}]
_SYSTEM: Final[Message] = {"role": "system", "content": "Be brief."}


def sample_conversations(
    renderer: ConversationRenderer, starts: Sequence[tuple[str, str]], *, user_every: int
) -> Iterator[tuple[list[Message], list[AssistantTurn]]]:
    """Yield prompts with turns that are followed by one result each, in the first one, or by several.

    Args:
        renderer: the model's template with an environment's tools.
        starts: how turns start: the part in the generation prompt, and the sampled part.
        user_every: number of turns after which a user message takes the place of results; 0: it never does.
    """
    longer = [*_ASK, {"role": "assistant", "content": "3."}, *_ASK]
    prompts = [_ASK, *filter(renderer.accepts, [longer, [_SYSTEM, *longer]])]
    turn_starts = cycle(starts)
    numbers = numbers_in(renderer.template.source)
    counts = [_PLAIN_TURNS + _SPECIAL_TURNS, *(number + 2 for number in numbers if number + 2 <= _MAX_TURNS)]
    contents = sample_contents(renderer.template.source)
    for index, first in enumerate(range(0, len(contents), _SPECIAL_TURNS)):
        special = cycle(contents[first : first + _SPECIAL_TURNS])  # some are repeated
        turns = []
        for number in range(counts[0] if index else max(counts)):
            opening, reasoning = next(turn_starts)
            texts = repeat("3.") if number < _PLAIN_TURNS else special
            if user_every and (number + first) % user_every == 0:
                replies: list[Message] = [{"role": "user", "content": next(texts)}]
            else:
                replies = [tool_reply(text, number) for text in islice(texts, 1 + number % 3 if index else 1)]
            turns.append(AssistantTurn((), f"{reasoning}Step {number}.", replies, opening))
        yield prompts[min(index, len(prompts) - 1)], turns


def tool_reply(text: str, number: int = 1) -> Message:
    """Return the result of a call."""
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05}", "content": text}
