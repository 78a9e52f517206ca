"""The judge of long runs: noise is not growth; one object left behind by each group is."""

import random

import pytest

from tests.soak.growth import BOUNDS, judge

LEAKS = {
    "server.memory": 1000,
    "server.elements": 1,
    "server.keys": 1,
    "server.clients": 0.1,
    "rollout-0.objects": 8,
    "score-1.files": 0.1,
    "rollout-1.tasks": 0.1,
    "rollout-1.threads": 0.1,
    "folder.files": 0.1,
}
"""Growth per group under each leak."""
LARGE = {"rollout-0.rss": 500.0, "score-0.rss": 500.0, "train-0.rss": 800.0}
"""Growth per group that only a long run reveals."""


def samples(name: str, per_group: float, groups: int, noise: float = 0.0):
    chance = random.Random(1)
    return [
        (ended, {name: 1e6 + per_group * ended + noise * chance.uniform(-1, 1)})
        for ended in range(0, groups, groups // 100)
    ]


@pytest.mark.parametrize("name", [*LEAKS, *LARGE])
def test_fluctuation_is_not_growth(name):
    noise = BOUNDS[name.partition(".")[2]].floor
    assert judge(samples(name, 0, 2000, noise), 2000, {})[name].well


@pytest.mark.parametrize(("name", "leak"), LEAKS.items())
def test_a_leak_per_group_is_growth_in_a_short_run(name, leak):
    assert not judge(samples(name, leak, 2000), 2000, {})[name].well


@pytest.mark.parametrize(("name", "leak"), LARGE.items())
def test_a_memory_leak_per_group_is_growth_in_a_long_run(name, leak):
    result = judge(samples(name, leak, 100_000), 100_000, {})[name]
    assert not result.well
    assert result.per_1000 == pytest.approx(1000 * leak)


def test_warming_up_is_not_growth():
    warming = [(ended, {"rollout-0.rss": 1e8 if ended > 400 else ended * 25e4}) for ended in range(0, 2000, 20)]
    assert judge(warming, 2000, {})["rollout-0.rss"].well


def test_growth_within_a_total_limit_is_allowed():
    grown = samples("folder.archive", 1000, 2000)
    assert judge(grown, 2000, {"folder.archive": 4e6})["folder.archive"].well
    assert not judge(grown, 2000, {"folder.archive": 2e6})["folder.archive"].well


def test_one_line_per_group_is_allowed():
    result = judge(samples("folder.ledger", 100, 2000), 2000, {})["folder.ledger"]
    assert result.well
    assert result.allowed is None
