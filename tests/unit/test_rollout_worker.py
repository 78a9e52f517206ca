"""The options that the rollout worker passes to a group's roll-out, and its record of the attempt."""

from types import SimpleNamespace

import pytest

from stream.codec import encode
from stream.queue.lease import Lease
from stream.records import Group, Prompt
from workers.role.in_flight_reporter import InFlightReporter
from workers.rollout.worker import StaleCanceller, TrainingRollout


class FakeStage:
    """Records completed leases."""

    consumer = "worker-1"

    async def complete(self, lease, next_stage, group):
        self.completed = lease, next_stage, group


@pytest.mark.parametrize(("published", "oldest"), [(7, 7), (0, 0), (-1, 0)])
async def test_only_the_published_policy_version_or_newer_ones_may_sample(published, oldest):
    asked = {}

    async def run(prompt, **options):
        asked.update(options)
        return Group(prompt=prompt, completions=[])

    stage = FakeStage()
    training = TrainingRollout(
        stage=stage,
        runner=SimpleNamespace(run=run),
        in_flight=InFlightReporter(stage),
        stale_canceller=StaleCanceller(stage, 1),
        with_greedy=True,
        progress_writer=None,
    )
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "Go."}])
    lease = Lease(id="1500-0", prompt_id="p", payload=encode(prompt), infra_failures=1, cancelled_attempts_s=(0.5,))
    await training.work(lease, published)
    assert (asked["min_policy_version"], asked["with_greedy"]) == (oldest, True)
    _, next_stage, group = stage.completed
    assert (next_stage, group.worker, group.attempt, group.cancelled_attempts_s) == ("groups", "worker-1", 2, [0.5])
    assert 0 < group.claimed_at <= group.rolled_out_at
    assert group.prompt.fed_at == 1.5
