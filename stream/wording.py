"""Numbers and texts of any origin as people read them: in the terminal, in the browser, in logs and in errors."""

import unicodedata
from collections.abc import Mapping
from typing import Final

_TAB: Final = "    "
_HARMLESS_FORMAT: Final = frozenset("\u200c\u200d")  # joiners of emoji and of several scripts
_ESCAPED_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def quantity(number: int, noun: str) -> str:
    """Return a number of things: `1 group`, `1,024 groups`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_counts(counts: Mapping[str, int]) -> str:
    """Return numbers by what they count: `finished 1,024, failed 3`."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def format_bytes(count: float) -> str:
    """Return a number of bytes in powers of 1000: `36 kB`, `2.1 MB`, `512 MB`, `6.0 GB`."""
    if count >= 0.95e9:
        return f"{count / 1e9:,.1f} GB"
    if count < 0.95e6:
        return f"{count / 1e3:,.0f} kB"
    return f"{count / 1e6:,.1f} MB" if count < 1e7 else f"{count / 1e6:,.0f} MB"


def format_duration(seconds: float) -> str:
    """Return a duration: `0.4 ms`, `12 ms`, `4.2 s`, `37 s`, `5 min 03 s`, `2 h 10 min`."""
    if 0 < seconds < 0.01:
        return f"{1000 * seconds:.1f} ms"
    if 0 < seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def cut(text: str, max_characters: int) -> str:
    """Return a text, or the beginning of one that is longer than `max_characters`."""
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"


def escape_controls(text: str) -> str:
    r"""Return the text with all characters visible: control and format characters as `\x1b`, `\u202e`.

    Line ends stay; a tab becomes blanks.
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\n" or character in _HARMLESS_FORMAT:
        return character
    if character == "\t":
        return _TAB
    if unicodedata.category(character) not in _ESCAPED_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")
