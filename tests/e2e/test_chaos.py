"""Random SIGKILLs lose nothing and train nothing twice; the weights are the evidence (`tests/soak/kills.py`)."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.soak.ends import intended
from tests.soak.kills import SLOTS, schedule
from tests.soak.run import SERVER

pytestmark = pytest.mark.usefixtures("preloaded")

ROOT = Path(__file__).parents[2]


def survives(
    *, kills: int, groups: int, seed: int, limit_s: float, server_kills: int = 0, fsync: str = "everysec"
) -> None:
    """Assert that a run with these kills ends as it would without them."""
    command = [sys.executable, "-m", "tests.soak.kills", "--kills", str(kills), "--groups", str(groups)]
    command += ["--server-kills", str(server_kills), "--fsync", fsync, "--seed", str(seed), "--limit", str(limit_s)]
    result = subprocess.run(
        [*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=limit_s + 30, check=False
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-3000:]}"
    report = json.loads(result.stdout)
    meant = Counter(intended(row) for row in range(groups))
    dropped = {end.partition(":")[2]: n for end, n in meant.items() if end.startswith("dropped:")}
    assert report["fed"] == groups
    assert report["trained"] == meant["trained"]
    assert report["dropped"] == dropped
    assert report["dead"] == meant["dead:prompts"] + meant["dead:scored"]
    assert report["lost"] == report["twice"] == report["contradicted"] == 0
    assert sum(report["kills"].values()) == kills + server_kills
    assert report["kills"].get("server", 0) == server_kills


@pytest.mark.timeout(150)
def test_fifteen_kills_of_roles_and_three_of_the_server_lose_nothing_and_train_nothing_twice():
    survives(kills=15, server_kills=3, fsync="always", groups=300, seed=1, limit_s=110)


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_kills_lose_nothing_and_train_nothing_twice(seed):
    survives(kills=100, groups=2000, seed=seed, limit_s=900)


@pytest.mark.full
@pytest.mark.timeout(150)
@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_three_kills_of_the_server_lose_nothing_and_train_nothing_twice(fsync):
    survives(kills=4, server_kills=3, fsync=fsync, groups=250, seed=4, limit_s=110)


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_ten_kills_of_the_server_and_a_hundred_of_roles_lose_nothing(fsync):
    survives(kills=100, server_kills=10, fsync=fsync, groups=2000, seed=1, limit_s=900)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_has_the_requested_kills_and_includes_every_role(seed):
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


@pytest.mark.parametrize("seed", range(5))
def test_kills_of_the_server_are_added_to_those_of_the_roles(seed):
    blows = schedule(30, seed, server_kills=8)
    assert [b.roles for b in blows if b.roles != (SERVER,)] == [b.roles for b in schedule(30, seed)]
    moments = [blow.when for blow in blows if blow.roles == (SERVER,)]
    assert len(moments) == 8
    assert set(moments) == {"fsync", "power", "checkpoint", "progress"}
    fractions = [blow.fraction for blow in blows if blow.when != "soon"]
    assert fractions == sorted(fractions)
