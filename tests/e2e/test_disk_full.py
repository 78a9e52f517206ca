"""Without disk space for a checkpoint the run stops with an error and acknowledges nothing; with space it resumes."""

import pytest

from stream.trainer.ledger_records import read_contents, read_ledger
from tests.soak.audit import acquitted
from tests.soak.faulty_connections import again, begin, travel
from tests.soak.witness import FULL_AFTER, HeavyWitness
from workers.runs.find import open_run
from workers.train.checkpointing.checkpoint import CheckpointStore

pytestmark = pytest.mark.usefixtures("preloaded")


GROUPS = 60
HEAVY = HeavyWitness.__name__


@pytest.mark.timeout(150)
def test_a_full_disk_at_a_checkpoint_stops_the_run_and_acknowledges_nothing(tmp_path):
    settings = begin(tmp_path, GROUPS)
    (settings.folder / FULL_AFTER).write_text("3")
    journey = travel(settings, learner=HEAVY, limit_s=100)
    assert "checkpoint step-000006 could not be written" in str(journey.outcome.failure), journey.logs
    assert "step-000003 stands. Make room on that disk and run again" in str(journey.outcome.failure)
    checkpoint = CheckpointStore(settings.folder / "checkpoints").latest()
    assert checkpoint.progress.step == 3
    lines, _ = read_ledger(settings.folder / "ledger.jsonl")
    # Dead letters are in the ledger too, but end without a group to acknowledge.
    after = [line.record for line in lines if line.end_offset > checkpoint.progress.ledger_bytes]
    behind = {record.prompt for record in after if record.has_group}
    assert behind, "nothing was done after the checkpoint"
    kept = read_contents(settings.folder / "ledger.jsonl", checkpoint.progress.ledger_bytes)
    assert not behind & kept.outcomes.keys()
    marked = open_run(settings.folder).call(lambda connection: connection.read_hash("scored:marked"))
    assert behind <= set(marked.values())

    (settings.folder / FULL_AFTER).unlink()
    journey = travel(again(tmp_path), learner=HEAVY, limit_s=100)
    assert journey.outcome.failure is None, journey.logs
    verdict = journey.verdict
    assert acquitted(verdict, GROUPS), f"{verdict}\n{journey.logs}"
