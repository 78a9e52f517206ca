"""Jobs that end their processes use up only their own tries. Real processes."""

import pytest

from envs.call import Failed, Ok
from envs.sandboxes.pools.pool import ProcessPool

HANDLER = """
import os

def handler():
    def run(job):
        if job.startswith(b"die"):
            os._exit(3)
        return job
    return run
"""


@pytest.fixture(autouse=True)
def handler(tmp_path, monkeypatch):
    (tmp_path / "poisoned_handler.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))


async def test_jobs_that_crash_their_process_do_not_affect_other_jobs():
    jobs = [b"die %d" % i if i % 4 < 3 else b"fine %d" % i for i in range(8)]
    async with ProcessPool.open("poisoned_handler:handler", {}, 3) as pool:
        outcomes = await pool.map(jobs, 20)
    for job, outcome in zip(jobs, outcomes, strict=True):
        if job.startswith(b"fine"):
            assert outcome == Ok(job)
        else:
            assert isinstance(outcome, Failed)
            assert "processes ended while they ran it" in str(outcome.error)
