"""Locate a turn's reasoning. Tool calls inside it are not executed, in any format."""

REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Opening and closing tags."""


def reasoning_end(text: str, *, starts_in_reasoning: bool = False) -> int:
    """Return how many characters of reasoning a turn starts with, including the closing tag; 0 if it has none.

    An unclosed block extends to the end of the turn. Everything before a closing tag is reasoning, even if the block
    was opened in the prompt or after some words: losing a call is better than executing one that was only considered.

    Args:
        text: the turn.
        starts_in_reasoning: the prompt opened the block.
    """
    if "think>" not in text and "THINK]" not in text:  # as in most turns
        return len(text) if starts_in_reasoning else 0
    start = text.lstrip()
    opened = [closing for opening, closing in REASONING_TAGS if start.startswith(opening)]
    closings = opened or [closing for _, closing in REASONING_TAGS]
    ends = [found + len(closing) for closing in closings if (found := text.find(closing)) >= 0]
    if ends:
        return min(ends)
    return len(text) if opened or starts_in_reasoning else 0


def open_reasoning(prompt: str) -> str:
    """Return the opening tag, with the white space after it, that a prompt ends with; empty if it does not."""
    end = prompt.rstrip()
    opening = next((opening for opening, _ in REASONING_TAGS if end.endswith(opening)), "")
    return prompt[len(end) - len(opening) :] if opening else ""
