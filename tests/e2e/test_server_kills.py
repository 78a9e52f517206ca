"""SIGKILL to the Redis server and to all roles: nothing is lost, nothing is trained twice."""

import pytest

from tests.chaos.survival import survives

pytestmark = pytest.mark.usefixtures("preloaded")


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
