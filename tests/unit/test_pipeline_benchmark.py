"""How the benchmark of overlap reads off when a run had a policy with a score."""

import pytest

from benchmarks.pipeline import earned, missed_aims, smooth, time_to_score


def step(version: int, reward: float, *, staleness: float = 0.0, count: int = 128) -> dict[str, float]:
    """Return the metrics of a step; version v was published v times 10 seconds after the first."""
    metrics = {"version": version, "staleness/mean": staleness, "reward/mean": reward, "reward/count": count}
    return metrics | {"publish/time": 1000.0 + 10 * version}


def test_a_batch_counts_at_the_time_of_the_version_that_sampled_it():
    """Two thirds of the last batch's tokens are from version 1, and one third from version 2."""
    steps = [step(0, 0.1), step(1, 0.2, staleness=1.0), step(2, 0.3, staleness=1.0), step(3, 0.4, staleness=5 / 3)]
    assert earned(steps, 1000.0) == [(0.0, 0.1), (0.0, 0.2), (10.0, 0.3), (pytest.approx(40 / 3), 0.4)]


def test_the_time_of_a_score_is_interpolated_on_the_mean_curve_of_all_runs():
    """One policy of the second run is far worse than those around it."""
    runs = [
        [(0.0, 0.1), (10.0, 0.5), (20.0, 0.6), (30.0, 0.8), (40.0, 1.0)],
        [(0.0, 0.3), (14.0, 0.7), (28.0, 0.2), (42.0, 1.0), (56.0, 1.0)],
    ]
    curve = smooth(runs)
    assert curve == [(12.0, pytest.approx(0.4)), (24.0, pytest.approx(3.8 / 6)), (36.0, pytest.approx(4.6 / 6))]
    assert time_to_score(curve, 0.7) == pytest.approx(30.0)
    assert time_to_score(curve, 0.95) == float("inf")
    assert time_to_score(curve, 0.1) == 12.0


def test_each_missed_aim_is_named():
    met = {"waits": 0.01, "sooner": 1.6, "score_difference": -0.02, "held_out_difference": 0.01}
    fixed = {"rollout_s": 1, "train_s": 2, "ratio": 1.04}
    assert missed_aims({"fixed": [fixed], "demo": [{"seed": 1, "compared": met}], "rise": {"sooner": 1.6}}) == []
    missed = missed_aims(
        {
            "fixed": [fixed | {"ratio": 1.2}],
            "rise": {"sooner": 1.3},
            "demo": [{"seed": 2, "compared": met | {"waits": 0.06, "sooner": 1.2, "score_difference": -0.1}}],
        }
    )
    assert [line.partition(":")[0] for line in missed] == [
        "1 s of rollout and 2 s of training",
        *["seed 2"] * 3,
        missed[-1],
    ]
    assert "rise" in missed[-1]
