"""Results of tools that are far longer than anything a completion can hold: cut, and the model reads that they were.

Without it a tool that returns 50 MB has all of it tokenised, for minutes and gigabytes, to find that it does not fit.
"""

from typing import Any

MAX_CHARACTERS_PER_TOKEN = 32
"""More than any tokenizer packs into its tokens on average, but for long runs of blanks."""


def truncate_result(content: str | list[dict[str, Any]], max_tokens: int) -> str | list[dict[str, Any]]:
    """What a tool returned, each text of it no longer than so many tokens could ever hold.

    Args:
        content: text, or content parts; those that are no text are left as they are.
        max_tokens: of a completion.

    Example:
        >>> cut("x" * 1000, max_tokens=1).splitlines()[1]
        '(cut off: it has 1,000 characters)'
    """
    max_characters = MAX_CHARACTERS_PER_TOKEN * max_tokens
    if isinstance(content, str):
        return _truncate(content, max_characters)
    return [
        part | {"text": _truncate(part["text"], max_characters)} if isinstance(part.get("text"), str) else part
        for part in content
    ]


def _truncate(text: str, max_characters: int) -> str:
    return (
        text if len(text) <= max_characters else f"{text[:max_characters]}\n(cut off: it has {len(text):,} characters)"
    )
