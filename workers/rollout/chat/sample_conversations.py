"""Sample conversations on which a template is tried before it renders a real one.

Their results hold every text in the template's source, which it might look for, and their number of turns exceeds every
small number in it, which it might compare with.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Final

from stream.records import Message
from workers.rollout.chat.continuation_frames import numbers_in, sample_contents
from workers.rollout.chat.renderer import AssistantTurn, ConversationRenderer

_TURNS: Final = 12
"""Of a conversation, which holds as many different contents."""
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
        user_every: every so many turns a user message takes the place of results; 0: never.
    """
    others = [[_SYSTEM, *_ASK], [*_ASK, {"role": "assistant", "content": "3."}, *_ASK]]
    prompts = cycle([_ASK, *filter(renderer.accepts, others)])
    turn_starts = cycle(starts)
    contents = sample_contents(renderer.template.source)
    counts = [number + 2 for number in numbers_in(renderer.template.source) if number + 2 <= _MAX_TURNS]
    for first in range(0, len(contents), _TURNS):
        results = cycle(contents[first : first + _TURNS])  # some are repeated
        turns = []
        for number in range(_TURNS if first else max(_TURNS, *counts, 0)):
            opening, reasoning = next(turn_starts)
            if user_every and (number + first) % user_every == 0:
                replies: list[Message] = [{"role": "user", "content": next(results)}]
            else:
                replies = [tool_reply(text, number) for text in islice(results, 1 + number % 3 if first else 1)]
            turns.append(AssistantTurn((), f"{reasoning}Step {number}.", replies, opening))
        yield next(prompts), turns


def tool_reply(text: str, number: int = 1) -> Message:
    """Return the result of a call."""
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05}", "content": text}
