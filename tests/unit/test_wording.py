"""Numbers and foreign texts for people."""

import pytest

from stream.wording import cut, escape_controls, format_bytes, format_counts, format_duration, quantity


@pytest.mark.parametrize(
    ("count", "text"), [(2_100_000, "2.1 MB"), (512e6, "512 MB"), (6e9, "6.0 GB"), (36_000, "36 kB")]
)
def test_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (0.0004, "0.4 ms"),
        (0.012, "12 ms"),
        (3.44, "3.4 s"),
        (31.4, "31 s"),
        (61, "1 min 01 s"),
        (3600 + 120, "1 h 02 min"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_one_thing_and_several():
    assert [quantity(n, "group") for n in (0, 1, 1024)] == ["0 groups", "1 group", "1,024 groups"]


def test_numbers_by_what_they_count():
    assert format_counts({"finished": 1024, "failed": 3}) == "finished 1,024, failed 3"
    assert format_counts({}) == ""


def test_a_long_text_is_cut():
    assert [cut("abcdef", n) for n in (5, 6)] == ["abcd…", "abcdef"]


def test_control_characters_become_visible_and_lines_still_end():
    assert escape_controls("plain\ntext") == "plain\ntext"
    assert escape_controls("\x1b[2J\n\t") == "\\x1b[2J\n    "
