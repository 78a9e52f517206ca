"""A trainer that was suspended past its own leases, and claims again what it has in hand."""

import anyio

from stream.operator.run_status import read_status
from stream.trainer.lease import GroupOutcome, TrainerLease
from stream.trainer.ledger import Ledger
from workers.settings.toml_file import parse_settings
from workers.train.groups.group_buffer import GroupBuffer


async def test_what_a_suspended_trainer_had_in_hand_ends_once(pipe, tmp_path):
    await pipe.scored("a")
    tenure = await TrainerLease.acquire(pipe.connection, 30.0)
    trainer = pipe.stage("scored", "trainer", lease_s=0.1)
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    settings = parse_settings(
        {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "r:f"}], "filter": {"min_valid_rows": 1}}
    )
    hand = GroupBuffer(settings, ledger, vocab_size=10)
    for _ in range(2):
        (lease,) = (await trainer.claim(1)).leases
        judgement = hand.offer(lease, 0)
        assert (judgement.outcome, judgement.unreadable) == ("", "")
        await anyio.sleep(0.12)
    leases, _ = hand.pop()
    assert await tenure.commit(trainer, [GroupOutcome(lease, "trained") for lease in leases], release_version=1) == []
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "trained": 1}
    assert await pipe.balance() == {"fed": 1, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 0}
    ledger.close()
