"""Random SIGKILLs: nothing lost, nothing trained twice. The weights are the witness (`tests/chaos`)."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.ends import intended
from tests.chaos.kills import SLOTS, schedule

CHAOS = Path(__file__).parents[1] / "chaos" / "run.py"


def survives(kills: int, groups: int, seed: int, limit_s: float) -> None:
    """A run with these kills ends as if there had been none."""
    command = [sys.executable, str(CHAOS), "--kills", str(kills), "--groups", str(groups), "--seed", str(seed)]
    result = subprocess.run(
        [*command, "--limit", str(limit_s), "--json"],
        capture_output=True,
        text=True,
        timeout=limit_s + 30,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-3000:]}"
    told = json.loads(result.stdout)
    meant = Counter(intended(row) for row in range(groups))
    dropped = {end.partition(":")[2]: n for end, n in meant.items() if end.startswith("dropped:")}
    assert told["fed"] == groups
    assert told["trained"] == meant["trained"]
    assert told["dropped"] == dropped
    assert told["dead"] == meant["dead:prompts"] + meant["dead:scored"]
    assert told["lost"] == told["twice"] == told["contradicted"] == 0
    assert sum(told["kills"].values()) == kills


@pytest.mark.timeout(150)
def test_fifteen_kills_lose_nothing_and_train_nothing_twice():
    survives(kills=15, groups=300, seed=1, limit_s=110)


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_kills_lose_nothing_and_train_nothing_twice(seed):
    survives(kills=100, groups=2000, seed=seed, limit_s=900)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_has_as_many_kills_as_were_asked_for_and_spares_no_role(seed):
    for kills in (15, 100):
        blows = schedule(kills, seed)
        killed = [role for blow in blows for role in blow.roles]
        assert len(killed) == kills
        assert set(killed) == set(SLOTS)
        assert any(blow.when == "checkpoint" for blow in blows)
        assert blows[-1].when != "soon"
        fractions = [blow.fraction for blow in blows if blow.when != "soon"]
        assert fractions == sorted(fractions)
        assert schedule(kills, seed) == blows
