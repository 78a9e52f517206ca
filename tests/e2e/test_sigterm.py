"""SIGTERM to each role of a run: the role releases its work and exits cleanly, and the run continues."""

import json
import os
import signal

import anyio
import pytest

from tests.soak.audit import acquitted
from tests.soak.faulty_connections import Journey, begin, travel
from tests.soak.run import processes

pytestmark = pytest.mark.usefixtures("preloaded")


GROUPS = 120
ROLES = ("rollout", "score", "train")


@pytest.mark.timeout(150)
def test_a_role_exits_with_0_after_sigterm_and_the_run_continues(tmp_path):
    async def terminate(journey: Journey) -> None:
        for turn, role in enumerate(ROLES):
            await journey.ended(GROUPS * (turn + 1) // 6)
            while not (pids := processes().get(role)):
                await anyio.sleep(0.02)
            os.kill(min(pids), signal.SIGTERM)
            sent.append(role)

    sent: list[str] = []
    journey = travel(begin(tmp_path, GROUPS), during=terminate, limit_s=120)
    assert sent == list(ROLES)
    assert journey.outcome.failure is None, journey.logs
    verdict = journey.verdict
    assert acquitted(verdict, GROUPS), f"{verdict}\n{journey.logs}"
    log = [json.loads(line) for line in (journey.folder / "logs" / "supervisor.log").read_text().splitlines()]
    codes = [line["code"] for line in log if line["event"] == "role.restarted"]
    assert codes == [0] * len(ROLES)
