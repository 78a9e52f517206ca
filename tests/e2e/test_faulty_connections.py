"""The whole path with faulty connections to engine and Redis: nothing is lost, nothing is trained twice.

The soak runs' witness and audit verify that every prompt has its intended end.
"""

import pytest

from tests.soak.audit import acquitted
from tests.soak.faulty_connections import Journey, begin, travel
from tests.soak.proxy import Fault, at_random, first_of

pytestmark = pytest.mark.usefixtures("preloaded")


LATE = Fault("delay", 0.2)
FIN, RST, STALL, HALF, GARBLED = (Fault(kind) for kind in ("fin", "rst", "stall", "truncate", "garble"))
SAMPLED = b'"choices"'
"""Marks the engine's answers to sampling requests. Control routes may take a minute to answer, so stalls there are
noticed after a minute only: the longer test covers them.
"""

DONE = b"\r\n\r\n{}"
"""The answer of a control route."""


def engine_fails(seed: int):
    return first_of(
        at_random(seed, [STALL], every=30, of=SAMPLED), at_random(seed, [LATE, FIN, RST, HALF, GARBLED], every=8)
    )


def redis_fails(seed: int):
    return at_random(seed, [LATE, FIN, RST, HALF], every=40)


def succeeded(journey: Journey, groups: int) -> bool:
    assert journey.outcome.failure is None, journey.logs
    verdict = journey.verdict
    assert acquitted(verdict, groups), f"{verdict}\n{journey.logs}"
    return True


@pytest.mark.timeout(120)
def test_connections_that_delay_stall_break_and_truncate_lose_nothing(tmp_path):
    journey = travel(begin(tmp_path, 100), on_engine=engine_fails(1), on_redis=redis_fails(1), limit_s=100)
    assert succeeded(journey, 100)
    assert journey.engine.struck.keys() == {"delay", "stall", "fin", "rst", "truncate", "garble"}
    assert journey.redis.struck.keys() == {"delay", "fin", "rst", "truncate"}


@pytest.mark.full
@pytest.mark.timeout(320)
@pytest.mark.parametrize("seed", range(2, 6))
def test_a_longer_run_over_worse_connections_loses_nothing(tmp_path, seed):
    plan = first_of(at_random(seed, [STALL], every=300), redis_fails(seed))
    journey = travel(begin(tmp_path, 400), on_engine=engine_fails(seed), on_redis=plan, limit_s=300)
    assert succeeded(journey, 400)
    assert journey.redis.struck["stall"]


@pytest.mark.full
@pytest.mark.timeout(420)
def test_a_stalled_weight_push_completes_later(tmp_path):
    """Two answers of control routes never arrive: the trainer retries, or a restarted trainer does."""
    journey = travel(begin(tmp_path, 60), on_engine=at_random(1, [STALL], every=3, most=2, of=DONE), limit_s=400)
    assert succeeded(journey, 60)
    assert journey.engine.struck == {"stall": 2}


@pytest.mark.full
@pytest.mark.timeout(150)
@pytest.mark.parametrize("seed", range(6))
def test_altered_bytes_in_redis_replies_lose_nothing(tmp_path, seed):
    """An altered answer may crash a worker, which loses nothing; an altered payload ends as a dead letter."""
    groups, garbled = 150, 2
    journey = travel(begin(tmp_path, groups), on_redis=at_random(seed, [GARBLED], every=150, most=garbled), limit_s=120)
    verdict = journey.verdict
    assert journey.outcome.failure is None, journey.logs
    assert journey.redis.struck == {"garble": garbled}
    assert verdict.lost == verdict.twice == verdict.contradicted == verdict.unsettled == 0, f"{verdict}\n{journey.logs}"
    assert verdict.astray <= garbled


@pytest.mark.full
@pytest.mark.timeout(240)
def test_half_open_connections_on_every_link_lose_nothing(tmp_path):
    """Three times, every open connection of every role falls silent for good, and nobody is told."""
    groups, stranded = 90, []

    async def strand(journey: Journey) -> None:
        for ended in (15, 40, 65):
            await journey.ended(ended)
            stranded.append((journey.engine.strand(), journey.redis.strand()))

    journey = travel(begin(tmp_path, groups), during=strand, limit_s=220)
    assert succeeded(journey, groups)
    assert stranded == [(n, m) for n, m in stranded if n >= 1 and m >= 4]
    assert len(stranded) == 3
