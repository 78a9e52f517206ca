"""Sentences on the pages are short enough to be read once."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_WORDS = 35


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs, items of lists, and cells of tables, without code blocks and pictures."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?: {4,}\S.*|!\[.*)$", "", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n", text):
        lines: list[str] = []
        for line in block.splitlines():
            if line.lstrip().startswith("|"):
                yield from re.split(r"(?<!\\)\|", line)
            elif re.match(r"\s*([-*]|\d+\.) |#", line):
                yield " ".join(lines)
                lines = [re.sub(r"^\s*([-*]|\d+\.|#+) ", "", line)]
            else:
                lines.append(line.strip())
        yield " ".join(lines)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page; code counts as one word, and a link as its text."""
    for paragraph in paragraphs(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`+[^`]+`+", "`", paragraph))
        yield from re.split(r"(?<=[.!?])\**\s+(?=[\"(*`\[A-Z0-9])|<br>", plain)


def long_sentences(text: str) -> list[str]:
    return [each for each in sentences(text) if sum(bool(re.search(r"\w|`", w)) for w in each.split()) > MAX_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_longer_than_35_words(page):
    assert not long_sentences(page.read_text())


def test_a_long_sentence_is_seen_wherever_it_stands():
    long = "Each " + "word " * MAX_WORDS + "counts."
    assert long_sentences(f"Short.\n\n- {long}\n- Short.")
    assert long_sentences(f"| a | Short. {long} |")
    assert not long_sentences(f"```\n{long}\n```\n\n{'word ' * MAX_WORDS}\n\nNext. {'word ' * (MAX_WORDS - 1)}")
