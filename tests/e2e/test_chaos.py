"""Random SIGKILLs lose nothing and train nothing twice; the witness's weights are the evidence (`tests/chaos`)."""

import pytest

from tests.chaos.schedule import SERVER, SLOTS, schedule
from tests.chaos.survival import survives

pytestmark = pytest.mark.usefixtures("preloaded")


@pytest.mark.timeout(150)
def test_fifteen_kills_of_roles_and_three_of_the_server_lose_nothing_and_train_nothing_twice():
    survives(kills=15, server_kills=3, fsync="always", groups=300, seed=1, limit_s=110)


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_kills_lose_nothing_and_train_nothing_twice(seed):
    survives(kills=100, groups=2000, seed=seed, limit_s=900)


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
