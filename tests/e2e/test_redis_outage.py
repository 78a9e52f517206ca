"""Redis is unavailable while the whole path runs: all roles wait, nothing is lost and nothing is trained twice."""

import anyio
import pytest

from tests.soak.audit import acquitted
from tests.soak.faulty_connections import Journey, begin, travel
from tests.soak.run import count_events

pytestmark = pytest.mark.usefixtures("preloaded")


GROUPS = 100
MOST_LINES = 60
"""One line for each concurrent call: two rollout workers with 4 groups in flight, two scorers with 8, and so on."""


@pytest.mark.parametrize(
    ("how", "seconds"),
    [
        pytest.param("stopped", 3.0, marks=pytest.mark.timeout(150)),
        pytest.param("stopped", 60.0, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
        pytest.param("unreachable", 60.0, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
    ],
)
def test_roles_wait_through_a_redis_outage(tmp_path, make_server, how, seconds):
    """`stopped`: connections are refused. `unreachable`: no data passes, but connections stay open."""
    server = make_server(fsync="always").start()
    away = []

    async def leave(journey: Journey) -> None:
        await journey.ended(GROUPS // 4)
        away.append(how)
        if how == "stopped":
            server.kill()
            await anyio.sleep(seconds)
            server.start()
        else:
            journey.redis.hold()
            await anyio.sleep(seconds)
            journey.redis.flow()

    journey = travel(
        begin(tmp_path, GROUPS, redis=server.url, reconnect_s=seconds + 60), during=leave, limit_s=seconds + 120
    )
    assert away == [how]
    assert journey.outcome.failure is None, journey.logs
    assert count_events(journey.folder, "role.restarted") == 0
    assert count_events(journey.folder, "redis.waiting") <= MOST_LINES
    verdict = journey.verdict
    assert acquitted(verdict, GROUPS), f"{verdict}\n{journey.logs}"
