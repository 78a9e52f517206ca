"""Where a turn's thought ends. What is only thought is not called, in any format."""

REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""How reasoning begins and ends."""


def reasoning_end(text: str, *, starts_in_reasoning: bool = False) -> int:
    """Characters of thought at a turn's beginning, its end tag included; 0 where the turn does not reason.

    A block that was never closed is thought up to the turn's end. Whatever stands before an end tag is thought, also
    where the block began in the prompt, or behind some words: better a call too few than one that was only considered.

    Args:
        text: the turn.
        starts_in_reasoning: the block began in the prompt.
    """
    start = text.lstrip()
    begun = [closing for opening, closing in REASONING_TAGS if start.startswith(opening)]
    closings = begun or [closing for _, closing in REASONING_TAGS]
    ends = [found + len(closing) for closing in closings if (found := text.find(closing)) >= 0]
    if ends:
        return min(ends)
    return len(text) if begun or starts_in_reasoning else 0


def open_reasoning(prompt: str) -> str:
    """The beginning of a reasoning block that a prompt ends with, white space included; or nothing."""
    end = prompt.rstrip()
    opening = next((opening for opening, _ in REASONING_TAGS if end.endswith(opening)), "")
    return prompt[len(end) - len(opening) :] if opening else ""
