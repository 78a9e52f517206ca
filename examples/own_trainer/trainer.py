"""A trainer that is not Penstock's: it leases scored groups, trains, publishes, and loses nothing however it is killed.

What it trains is a table: for each prompt an estimate of its reward, and how often that was updated. The policy is the
same model all the time, published under a new number after each step. Put a model of yours in both places.

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

from stream import Measured, ResumePoint, connect, consume


def train(table, group):
    value, updates = table.get(group.prompt.id, (0.0, 0))
    for reward in [c.reward for c in group.completions if isinstance(c.reward, Measured)]:  # others are no 0
        value -= 0.1 * (value - reward.value)  # the gradient of half the squared error
    table[group.prompt.id] = (value, updates + 1)


def save(path, state, resume_point):
    with path.with_suffix(".tmp").open("wb", buffering=0) as file:
        file.write(json.dumps(state | msgspec.structs.asdict(resume_point)).encode())
        os.fsync(file.fileno())
    path.with_suffix(".tmp").rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name is durable, too
    os.close(folder)


async def main(folder, redis, run, engine, model):
    path, state = folder / "table.json", {"table": {}, "step": 0, "ledger_bytes": 0, "version": -1}
    state |= json.loads(path.read_text()) if path.exists() else {}
    resume = ResumePoint(ledger_bytes=state["ledger_bytes"], version=state["version"], step=state["step"])
    async with (
        connect(redis, run) as connection,
        consume(connection, folder / "ledger.jsonl", resume, lease_s=5.0) as groups,
    ):
        while True:
            await groups.publish(model, state["step"], partial(push, engine, model))
            if not (taken := await groups.claim(8)):
                break
            for each in taken:
                train(state["table"], each.group)
            state["step"] += 1
            await groups.commit(taken, state["step"])
            if state["step"] % 3 == 0:
                await groups.checkpoint(partial(save, path, state))
        await groups.checkpoint(partial(save, path, state))
        await groups.finish(f"trained {state['step']} steps")


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), *sys.argv[2:])
