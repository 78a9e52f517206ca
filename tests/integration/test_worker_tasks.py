"""A background task of a worker fails: the worker ends, and its leased entries go to other workers."""

import anyio
import pytest

from stream.queue.stage import RetryPolicy, Stage
from workers.role.work_loop import work_loop


class Broken(Stage):
    """A stage whose lease renewals fail."""

    async def renew_leases(self) -> None:
        while not self.leases:
            await anyio.sleep(0.01)
        raise RuntimeError("a defect in the renewals")


async def test_an_exception_in_a_background_task_ends_the_worker_and_loses_nothing(pipe):
    await pipe.feed("a", "b")
    stage = Broken(pipe.connection, "prompts", "broken", RetryPolicy(lease_s=30.0))

    async def never_done(lease, version) -> None:
        await anyio.sleep_forever()

    with (
        anyio.fail_after(10),
        pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="defect"), flatten_subgroups=True),
    ):
        await work_loop(stage, never_done, concurrency=4, stopping=anyio.Event())
    assert not stage.leases
    again = await pipe.stage("prompts", "other").claim(5)
    assert {lease.prompt_id for lease in again.leases} == {"a", "b"}
