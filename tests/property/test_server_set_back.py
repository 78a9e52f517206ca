"""Random runs whose server is set back or emptied, whose trainer is killed, and whose newest checkpoint is unreadable.

After every action the account balances. At the end every prompt has exactly one end, by a count that reads the ledger's
lines and shares no code with the run.
"""

import json
import random
from collections import Counter
from pathlib import Path

import anyio
import pytest

from stream.connection.keys import STAGES
from stream.connection.run_connection import connect
from stream.errors import PenstockError
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.operator.status import read_status
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Prompt
from stream.trainer.consumer import Consumer
from stream.trainer.folder_lock import RunFolderLock, last_token
from stream.trainer.leased_group import ResumePoint
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Dropped, read_contents
from stream.trainer.trainer_lease import TrainerLease
from tests.cases.records import assert_records_are_owned

PROMPTS = 30
MEMORY = 8
"""How many actions the server may be set back."""
TERMS = RetryPolicy(lease_s=600.0, infra_attempts=1000, data_attempts=1000, backoff_s=0.0)
ACTIONS = {
    "feed": 6, "pass_on": 10, "train": 6, "checkpoint": 2, "kill": 1, "set_back": 2, "dead_letter": 1,
    "resolve": 1, "empty": 0.3, "fall_back": 0.3, "come_back": 0.3,
}  # fmt: skip


def check(group, _version):
    return Dropped("stale") if int(group.prompt.id) % 5 == 1 else group


aside = anyio.to_thread.run_sync


class Run:
    """One random run. Feeder, workers and trainer act one at a time, in a random order."""

    def __init__(self, pipe, folder: Path, seed: int) -> None:
        self.pipe, self.folder, self.chance = pipe, folder, random.Random(seed)
        self.connection = pipe.connection
        self.path = folder / "ledger.jsonl"
        self.checkpoints = [ResumePoint()]
        self.lives = 0
        self.ledger: Ledger | None = None
        self.snapshots: list[dict[bytes, bytes]] = []
        self.log: list[str] = []

    async def play(self, actions: int) -> None:
        await self.begin(self.checkpoints[-1])
        for _ in range(actions):
            await self.act(self.chance.choices(list(ACTIONS), list(ACTIONS.values()))[0])
        for _ in range(200):
            if await self.is_drained():
                break
            for name in ("feed", "pass_on", "pass_on", "train", "time_passes"):
                await self.act(name)
        await self.act("checkpoint")
        await self.consumer.finish("done")
        await self.check_the_end()

    async def act(self, name: str) -> None:
        self.log.append(name)
        await getattr(self, name)()
        counts = (await read_status(self.connection)).prompt_counts
        assert counts["fed"] == sum(n for part, n in counts.items() if part != "fed"), (counts, self.log)
        assert counts["fed"] <= PROMPTS, (counts, self.log)
        self.snapshots = [*self.snapshots[-MEMORY:], await self.dump()]

    async def is_drained(self) -> bool:
        status = await read_status(self.connection)
        return status.feed.get("cursor") == str(PROMPTS) and not status.unfinished and not self.consumer.buffer

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    # -- actions

    async def feed(self) -> None:
        feed = Feed(self.connection, 1000)
        cursor = await feed.cursor()
        ended = {}
        if not cursor:
            policy = await self.connection.read_hash("policy")
            ended = (await aside(read_contents, self.path, int(policy["ledger"]))).ends()
        start = int(cursor or 0)
        stop = min(PROMPTS, start + self.chance.randint(1, 4))
        if start < stop:
            rows = [Prompt(id=str(row), messages=[]) for row in range(start, stop)]
            await feed.put(rows, cursor, str(stop), ended=ended)

    async def pass_on(self) -> None:
        for name, into in (("groups", "scored"), ("prompts", "groups")):
            stage = Stage(self.connection, name, "worker", TERMS)
            for lease in (await stage.claim(self.chance.randint(0, 4))).leases:
                group = self.pipe.group(lease.prompt_id)
                await (stage.complete_scored(lease, group) if into == "scored" else stage.complete(lease, into, group))

    async def dead_letter(self) -> None:
        name = self.chance.choice(("prompts", "groups"))
        stage = Stage(self.connection, name, "worker", TERMS)
        for lease in (await stage.claim(1)).leases:
            await stage.dead_letter(lease, "unreadable", "altered")

    async def resolve(self) -> None:
        letters = await list_dead_letters(self.connection)
        if letters:
            verb = self.chance.choice((retry_dead_letters, drop_dead_letters))
            await verb(self.connection, [self.chance.choice(letters).id])

    async def train(self) -> None:
        await self.consumer.trainer_lease.renew()  # notices that the server was set back
        await self.consumer.poll(self.chance.randint(1, 4))
        if self.consumer.buffer and self.chance.random() < 0.8:
            groups = self.consumer.pop(sorted(self.consumer.buffer)[: self.chance.randint(1, 3)])
            await self.consumer.commit(groups, self.consumer.step + 1)
            await self.consumer.announce(await self.consumer.reserve_version(), self.folder, self.consumer.step)

    async def checkpoint(self) -> None:
        self.checkpoints = [*self.checkpoints[-2:], await self.consumer.sync()]
        await self.consumer.acknowledge()

    async def kill(self) -> None:
        self.ledger.close()
        await self.begin(self.checkpoints[-1])

    async def set_back(self) -> None:
        if self.snapshots:
            await self.restore(self.chance.choice(self.snapshots))

    async def empty(self) -> None:
        await self.restore({})
        for stage in STAGES:
            await self.connection.create_stream(stage)
        await self.kill()

    async def fall_back(self) -> None:
        """Start from the checkpoint before the newest, go on for a while, and save no other."""
        if len(self.checkpoints) > 2:
            self.ledger.close()
            self.fallen = True
            await self.begin(self.checkpoints[-2], is_newest=False)
            for _ in range(self.chance.randint(0, 3)):
                await self.act(self.chance.choice(("feed", "pass_on", "train", "dead_letter")))
            if self.chance.random() < 0.5:
                await self.act("come_back")
            else:
                self.checkpoints.pop()  # it never comes back
                await self.act("checkpoint")

    async def come_back(self) -> None:
        await self.kill()

    async def time_passes(self) -> None:
        for stage in STAGES:
            for entry in await self.connection.redis.zrange(self.connection.key(f"{stage}:leases"), 0, -1):
                await self.connection.redis.zadd(self.connection.key(f"{stage}:leases"), {entry: 0})

    # -- the trainer

    async def begin(self, resume: ResumePoint, *, is_newest: bool = True) -> None:
        self.lives += 1
        await self.connection.redis.hdel(self.connection.key("policy"), "owner")
        lease = await TrainerLease.acquire(self.connection, 600.0, await aside(last_token, self.folder))
        lock = await aside(RunFolderLock.acquire, self.folder, lease.token)
        self.ledger = await aside(
            lambda: Ledger(self.path, resume.ledger_bytes, lock, digest=resume.ledger_digest, cut=False)
        )
        is_saved = len(self.checkpoints) > 1
        again = await lease.recover(self.ledger, keep_cut=not is_newest, has_checkpoint=is_saved)
        stage = Stage(self.connection, "scored", f"trainer-{self.lives}", TERMS)
        self.consumer = Consumer(lease, stage, self.ledger, resume, check, requeued_groups=again)

    # -- the server

    async def dump(self) -> dict[bytes, bytes]:
        keys = [key async for key in self.connection.redis.scan_iter(f"{{{self.connection.run}}}*")]
        return {key: value for key in keys if (value := await self.connection.redis.dump(key)) is not None}

    async def restore(self, snapshot: dict[bytes, bytes]) -> None:
        keys = [key async for key in self.connection.redis.scan_iter(f"{{{self.connection.run}}}*")]
        async with self.connection.redis.pipeline(transaction=True) as everything:
            if keys:
                everything.delete(*keys)
            for key, value in snapshot.items():
                everything.restore(key, 0, value)
            await everything.execute()

    # -- the count

    async def check_the_end(self) -> None:
        assert await self.is_drained(), (await read_status(self.connection), self.log)
        ended, dead = Counter(), set()
        for text in (await anyio.Path(self.path).read_bytes()).splitlines():
            line = json.loads(text)
            if line["outcome"].startswith("dead:"):
                dead.add(line["prompt"])
            elif line["outcome"] == "retried":
                dead.discard(line["prompt"])
            else:
                ended[line["prompt"]] += 1
                dead.discard(line["prompt"])
        assert set(ended.values()) <= {1}, (ended, self.log)
        assert ended.keys() | dead == set(map(str, range(PROMPTS))), (ended, dead, self.log)
        await assert_records_are_owned(self.connection)
        counts = (await read_status(self.connection)).prompt_counts
        assert counts["fed"] == PROMPTS
        assert (counts["trained"] + counts["dropped"], counts["dead"]) == (len(ended), len(dead)), self.log


NIGHTLY = [pytest.param(n, marks=pytest.mark.full) for n in range(5, 600, 5)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", [0, *NIGHTLY])
async def test_a_server_that_is_set_back_never_unbalances_the_account(pipe_on, redis_url, tmp_path, first):
    for seed in range(first, first + 5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        async with connect(redis_url, f"set-back-{folder.name}-{random.Random().getrandbits(40)}") as connection:
            run = Run(pipe_on(connection), folder, seed)
            try:
                await run.play(60)
            except (PenstockError, AssertionError) as error:
                raise AssertionError(f"seed {seed}: {error}; {run.log}") from error
            else:
                await run.restore({})  # the next one scans the server for its keys
            finally:
                run.close()
