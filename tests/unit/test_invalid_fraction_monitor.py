"""The monitor of invalid completions counts reasons by environment, over a full window."""

import pytest

from stream.errors import RunFailedError
from workers.train.groups.invalid_fraction_monitor import InvalidFractionMonitor

TIMEOUT, RAISED = "reward:timeout", "reward:raised"


def test_a_healthy_run_continues():
    guard = InvalidFractionMonitor(0.2, 4)
    for _ in range(20):
        guard.observe("e", 5, {TIMEOUT: 1})


def test_a_reason_above_the_limit_ends_the_run_and_is_named():
    guard = InvalidFractionMonitor(0.2, 4)
    for _ in range(3):
        guard.observe("e", 3, {TIMEOUT: 1})
    with pytest.raises(RunFailedError, match=r"4 of the last 12 completions of e .* reward:timeout"):
        guard.observe("e", 3, {TIMEOUT: 1})


def test_two_reasons_below_the_limit_are_not_added_up():
    guard = InvalidFractionMonitor(0.4, 2)
    guard.observe("e", 3, {TIMEOUT: 1, RAISED: 1})
    guard.observe("e", 3, {TIMEOUT: 1, RAISED: 1})


def test_environments_are_counted_separately():
    guard = InvalidFractionMonitor(0.5, 2)
    for _ in range(2):
        guard.observe("good", 1, {})
    guard.observe("bad", 1, {TIMEOUT: 1})
    with pytest.raises(RunFailedError, match="bad"):
        guard.observe("bad", 1, {TIMEOUT: 1})


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("failed:engine", "fix the environment or the engine"),
        ("truncated:wall_clock", "algorithm.truncation"),
        ("rejected:too_old", "pacing.max_token_age"),
        ("rejected:not_finite", "log-probs"),
        ("rejected:no_token", "nothing was sampled"),
        ("rejected:branch_role", "agents.train"),
        ("rejected:branch_program", "the program wants none"),
        ("rejected:branch_superseded", "the program continued none"),
        ("rejected:seq_mean_k1", "correction.reject"),
    ],
)
def test_every_reason_has_a_remedy(reason, remedy):
    with pytest.raises(RunFailedError, match=f"{reason}.*{remedy}"):
        InvalidFractionMonitor(0.2, 1).observe(None, 2, {reason: 1})


def test_groups_outside_the_window_do_not_count():
    guard = InvalidFractionMonitor(0.5, 2)
    guard.observe("e", 2, {TIMEOUT: 2})
    for _ in range(3):
        guard.observe("e", 2, {})
