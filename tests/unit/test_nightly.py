"""The slices of the long tests that CI runs: a different one every day, all of them within a month."""

import argparse
from datetime import date, timedelta

import pytest

from tests.nightly import SLICES, slice_of


def test_every_slice_runs_once_per_cycle():
    days = [date(2026, 2, 20) + timedelta(days=n) for n in range(SLICES)]
    assert sorted(slice_of("today", day) for day in days) == [(number, SLICES) for number in range(SLICES)]


def test_a_slice_can_be_selected_by_number():
    assert slice_of("7/30", date(2026, 1, 1)) == (7, 30)


@pytest.mark.parametrize("text", ["", "tomorrow", "3", "30/30", "-1/30", "1/2/3"])
def test_an_invalid_slice_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no slice"):
        slice_of(text, date(2026, 1, 1))
