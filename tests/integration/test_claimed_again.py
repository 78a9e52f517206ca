"""A trainer that was suspended past its own leases, and claims again what it has in hand."""

import anyio

from stream.ledger import Ledger
from stream.training import End, Tenure
from stream.view import look
from workers.settings.file import parse
from workers.train.groups.hand import Hand


async def test_what_a_suspended_trainer_had_in_hand_ends_once(pipe, tmp_path):
    await pipe.scored("a")
    tenure = await Tenure.begin(pipe.link, 30.0)
    trainer = pipe.stage("scored", "trainer", lease_s=0.1)
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    settings = parse(
        {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "r:f"}], "filter": {"min_valid_rows": 1}}
    )
    hand = Hand(settings, ledger, vocabulary=10)
    for _ in range(2):
        (lease,) = (await trainer.claim(1)).leases
        judgement = hand.consider(lease, 0)
        assert (judgement.ending, judgement.unreadable) == ("", "")
        await anyio.sleep(0.12)
    leases, _ = hand.deal()
    assert await tenure.commit(trainer, [End(lease, "trained") for lease in leases], frees_at=1) == []
    assert (await look(pipe.link)).counts == {"fed": 1, "trained": 1}
    assert await pipe.balance() == {"fed": 1, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 0}
    ledger.close()
