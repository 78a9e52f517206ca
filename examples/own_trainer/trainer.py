"""A trainer of your own: it leases scored groups, trains, publishes, and loses nothing when it is killed.

It trains a table: for each prompt an estimate of its reward, and the number of updates. The policy is always the same
model, published under a new version after each step. Replace both with your model.

    python examples/own_trainer/trainer.py RUN_FOLDER REDIS_URL RUN_NAME ENGINE_URL MODEL_FOLDER
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import anyio
import msgspec
from engine import push

from penstock.trainer import Measured, ResumePoint, connect, consume


def train(table, group):
    value, updates = table.get(group.prompt.id, (0.0, 0))
    for reward in [c.reward for c in group.completions if isinstance(c.reward, Measured)]:  # unmeasured is not 0
        value -= 0.1 * (value - reward.value)  # the gradient of half the squared error
    table[group.prompt.id] = (value, updates + 1)


def save(path, state, resume_point):
    with path.with_suffix(".tmp").open("wb", buffering=0) as file:
        file.write(json.dumps(state | msgspec.structs.asdict(resume_point)).encode())
        os.fsync(file.fileno())
    path.with_suffix(".tmp").rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # makes the new name durable
    os.close(folder)


async def main(folder, redis, run, engine, model):
    path, state = folder / "table.json", {"table": {}, "step": 0, "ledger_bytes": 0, "version": -1}
    state |= json.loads(path.read_text()) if path.exists() else {}
    resume = ResumePoint(ledger_bytes=state["ledger_bytes"], version=state["version"], step=state["step"])
    async with (
        connect(redis, run) as connection,
        consume(connection, folder / "ledger.jsonl", resume, lease_s=5.0) as consumer,
    ):
        while True:
            await consumer.publish(model, state["step"], partial(push, engine, model))
            if not (batch := await consumer.claim(8)):
                break
            for each in batch:
                train(state["table"], each.group)
            state["step"] += 1
            await consumer.commit(batch, state["step"])
            if state["step"] % 3 == 0:
                await consumer.checkpoint(partial(save, path, state))
        await consumer.checkpoint(partial(save, path, state))
        await consumer.finish(f"trained {state['step']} steps")


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), *sys.argv[2:])
