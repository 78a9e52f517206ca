"""Pacing and staleness in whole runs of real processes: outstanding groups, stalls, token ages."""

from collections import Counter

import pytest

from benchmarks.late import LATE_ENGINE, describe, run, steps, trained_numbers
from tests.soak import witness
from tests.soak.ends import NO_SIGNAL, TRAINED, intended, numbers_with
from workers.train.checkpointing.checkpoint import CheckpointStore

pytestmark = pytest.mark.usefixtures("preloaded")


def ended_well(settings, watched, numbers):
    """Assert that the run finished and every prompt has its intended end; returns the last status."""
    assert watched.outcome is not None, "the run did not come to its end in time"
    assert watched.outcome.failure is None
    status = watched.outcome.status
    meant = Counter(intended(number) for number in numbers)
    assert status.counts["trained"] == meant[TRAINED]
    assert status.dropped == ({"zero_variance": meant[NO_SIGNAL]} if meant[NO_SIGNAL] else {})
    assert (status.unfinished, status.outstanding, status.dead) == (0, 0, 0)
    weights = witness.testimony(CheckpointStore(settings.folder / "checkpoints").latest().model).tolist()
    assert weights == [float(intended(number) == TRAINED) for number in numbers]
    return status


def numbers_of(dropped, trained):
    """Return the sorted row numbers of `dropped` prompts that will be dropped and `trained` that will be trained."""
    return sorted(numbers_with(dropped, NO_SIGNAL) + numbers_with(trained, TRAINED))


def run_within_capacity(settings, numbers, *engine):
    """Assert that the run finishes, and that the outstanding groups reach the bound but never exceed it."""
    watched = run(settings, *engine)
    ended_well(settings, watched, numbers)
    assert max(outstanding for _, outstanding in watched.looks) == settings.capacity
    return watched


def straggler_seconds_without_staleness(settings):
    step_metrics = steps(settings)
    assert sum(step["stragglers/abandoned"] for step in step_metrics) == 0
    assert max(step["staleness/max"] for step in step_metrics) <= settings.pacing.max_staleness
    return sum(step["stragglers/seconds"] for step in step_metrics)


@pytest.mark.timeout(120)
def test_wait_trains_nothing_too_old_discards_nothing_and_respects_the_capacity(tmp_path):
    numbers = numbers_of(dropped=10, trained=60)
    settings = describe(tmp_path, numbers, late="wait", max_staleness=1, batch_size=4)
    watched = run_within_capacity(settings, numbers, LATE_ENGINE, "--median", "16")
    assert straggler_seconds_without_staleness(settings) > 0
    assert watched.outcome.status.counts.get("cancelled", 0) == 0


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("late", ["train", "wait", "cancel"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_thousand_dropped_groups_do_not_change_the_capacity(tmp_path, max_staleness, late):
    numbers = numbers_of(dropped=1200, trained=800)
    settings = describe(tmp_path, numbers, late=late, max_staleness=max_staleness, batch_size=4, save_every=50)
    watched = run_within_capacity(settings, numbers)
    if late == "wait":
        straggler_seconds_without_staleness(settings)
    # The end of the run has too few prompts left to fill the bound.
    after = [outstanding for dropped, outstanding in watched.looks if 1000 <= dropped < 1150]
    assert max(after) == settings.capacity


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("late", ["train", "wait", "cancel"])
def test_max_staleness_0_with_a_checkpoint_every_ten_steps_does_not_stall(tmp_path, late):
    numbers = trained_numbers(240)
    settings = describe(tmp_path, numbers, late=late, max_staleness=0, batch_size=4, save_every=10)
    run_within_capacity(settings, numbers)
    assert len(steps(settings)) == 60


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("late", ["train", "cancel"])
def test_with_lognormal_durations_every_prompt_ends_and_stale_groups_are_reported(tmp_path, late):
    numbers = trained_numbers(240)
    settings = describe(tmp_path, numbers, late=late, max_staleness=1)
    status = ended_well(settings, run(settings, LATE_ENGINE), numbers)
    step_metrics = steps(settings)
    assert (status.counts.get("cancelled", 0) > 0) == (late == "cancel")
    if late == "train":
        assert max(step["staleness/max"] for step in step_metrics) > 1
    assert (
        status.counts.get("cancelled", 0) == sum(step["attempt/cancelled"] for step in step_metrics) <= 2 * len(numbers)
    )
