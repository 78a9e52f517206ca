"""Delays between tries."""

import pytest

from stream.waiting import Backoff


def test_delays_double_up_to_the_maximum():
    backoff = Backoff(0.1, 2.0, jitter=0.0)
    assert [backoff.delay_s(attempt) for attempt in (1, 2, 3, 6, 10_000)] == pytest.approx([0.1, 0.2, 0.4, 2.0, 2.0])


def test_jitter_shortens_a_delay_by_at_most_its_fraction():
    delays = [Backoff(1.0, 1.0).delay_s(1) for _ in range(1000)]
    assert 0.5 <= min(delays) < 0.6
    assert 0.9 < max(delays) <= 1.0
