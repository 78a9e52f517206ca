"""Groups per second through stages, and the time of a claim with many pending entries, compared to bare commands.

    python benchmarks/pipe.py [--groups 600] [--pending 10000] [--rounds 3] [--json]

A group is 16 completions of 1000 tokens: ids and log-probs, 127 KiB. The server is private, on a unix socket, with
`appendfsync everysec`; workers are tasks of one process. The baseline sends the same bytes with the same client in the
same run: XREADGROUP, XADD, XACK, XDEL, without owner, lease, counts or atomicity. `end_to_end` is encode, complete,
claim, decode, complete, claim, decode, commit, acknowledge.

With one client process on two cores, server and client have one core each. The disk's write cache decides how much
`everysec` costs. Figures are medians of the rounds.
"""

import argparse
import json
import statistics
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import structlog

from stream.codec import decode, encode
from stream.connection.run_connection import RunConnection, connect
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Completion, Group, Prompt, Row, Span
from stream.server_process import private_server
from stream.trainer.lease import EndedGroup, TrainerLease
from stream.trainer.outcomes import Trained
from stream.validity import Measured

AT_ONCE = 4
"""Tasks of a stage, and entries of a claim."""
GROUP = "floor"


def make_group(prompt_id: str, completions: int = 16, tokens: int = 1000) -> Group:
    row = Row(
        prompt_ids=struct.pack("64i", *range(64)),
        token_ids=struct.pack(f"{tokens}i", *range(tokens)),
        sampled_ranges=[(0, tokens)],
        logprobs=struct.pack(f"{tokens}f", *(-i / tokens for i in range(tokens))),
        spans=[Span(0, 0, tokens)],
    )
    rows = [Completion(index=i, rows=[row], reward=Measured(1.0)) for i in range(completions)]
    return Group(prompt=Prompt(id=prompt_id, messages=[]), completions=rows)


async def work(stage: Stage, total: list[int], do: Callable[[list], Awaitable[None]]) -> None:
    """Claim until the stage has processed all groups."""
    while total[0] > 0:
        claim = await stage.claim(min(AT_ONCE, total[0]))
        total[0] -= len(claim.leases)
        if claim.leases:
            await do(claim.leases)
        elif total[0] > 0:
            await stage.wait(claim, 0.1)


async def feed(connection: RunConnection, groups: int) -> None:
    await Feed(connection, groups).put([Prompt(id=f"p{i}", messages=[]) for i in range(groups)], "", "1")


async def roll_out(connection: RunConnection, groups: int) -> None:
    made, left = make_group("p"), [groups]

    async def do(leases):
        for lease in leases:
            await stage.complete(lease, "groups", made)

    stage = Stage(connection, "prompts", "rollout", RetryPolicy())
    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(work, stage, left, do)


async def score(connection: RunConnection, groups: int) -> None:
    left = [groups]

    async def do(leases):
        for lease in leases:
            await stage.complete(lease, "scored", decode(lease.payload, Group))

    stage = Stage(connection, "groups", "score", RetryPolicy())
    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(work, stage, left, do)


async def train(connection: RunConnection, groups: int) -> None:
    trainer_lease, marked = await TrainerLease.acquire(connection, 60.0), []

    async def do(leases):
        for lease in leases:
            decode(lease.payload, Group)
        await trainer_lease.commit(stage, [EndedGroup(lease, Trained()) for lease in leases], release_version=1)
        marked.extend(lease.id for lease in leases)
        if len(marked) >= 64:
            await trainer_lease.acknowledge(marked)
            marked.clear()

    stage = Stage(connection, "scored", "train", RetryPolicy())
    await work(stage, [groups], do)
    await trainer_lease.acknowledge(marked)


async def one_stage(connection: RunConnection, groups: int) -> float:
    """Claim and complete, 127 KiB in and out."""
    await feed(connection, groups)
    await roll_out(connection, groups)
    began = time.perf_counter()
    await score(connection, groups)
    return groups / (time.perf_counter() - began)


async def one_stage_floor(connection: RunConnection, groups: int) -> float:
    """The same bytes through the same client: read a group, decode and encode it, add it, acknowledge, delete."""
    redis, source, sink, payload, left = connection.redis, "floor:in", "floor:out", encode(make_group("p")), groups
    await redis.xgroup_create(source, GROUP, id="0", mkstream=True)
    for _ in range(groups):
        await redis.xadd(source, {"prompt": "p", "payload": payload})

    async def worker() -> None:
        nonlocal left
        while left > 0:
            count, left = min(AT_ONCE, left), left - AT_ONCE
            for _, entries in await redis.xreadgroup(GROUP, "w", {source: ">"}, count=count):
                for entry, fields in entries:
                    again = encode(decode(fields[b"payload"], Group))
                    await redis.xadd(sink, {"prompt": "p", "payload": again})
                    await redis.xack(source, GROUP, entry)
                    await redis.xdel(source, entry)

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(worker)
    elapsed = time.perf_counter() - began
    await redis.delete(source, sink)
    return groups / elapsed


async def end_to_end(connection: RunConnection, groups: int) -> float:
    await feed(connection, groups)
    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for role in (roll_out, score, train):
            tasks.start_soon(role, connection, groups)
    return groups / (time.perf_counter() - began)


async def claims(connection: RunConnection, pending: int, count: int) -> tuple[float, float]:
    """Return microseconds of a claim with many pending entries, at the client and in the server."""
    await feed(connection, pending + count)
    stage = Stage(connection, "prompts", "w", RetryPolicy(lease_s=600.0))
    for _ in range(0, pending, 1000):
        await stage.claim(min(1000, pending))
    return await timed(connection, "evalsha", lambda: stage.claim(1), count)


async def claims_floor(connection: RunConnection, pending: int, count: int) -> tuple[float, float]:
    redis, source = connection.redis, "floor:pending"
    await redis.xgroup_create(source, GROUP, id="0", mkstream=True)
    payload = encode(Prompt(id="p", messages=[]))
    for _ in range(pending + count):
        await redis.xadd(source, {"prompt": "p", "payload": payload})
    await redis.xreadgroup(GROUP, "w", {source: ">"}, count=pending)
    result = await timed(connection, "xreadgroup", lambda: redis.xreadgroup(GROUP, "w", {source: ">"}, count=1), count)
    await redis.delete(source)
    return result


async def timed(
    connection: RunConnection, command: str, call: Callable[[], Awaitable[object]], count: int
) -> tuple[float, float]:
    await connection.redis.config_resetstat()
    began = time.perf_counter()
    for _ in range(count):
        await call()
    elapsed = time.perf_counter() - began
    stats = await connection.redis.info("commandstats")
    return 1e6 * elapsed / count, stats[f"cmdstat_{command}"]["usec_per_call"]


async def bench(arguments: argparse.Namespace) -> dict[str, float]:
    seen: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with private_server(Path(folder)) as url:
            for turn in range(arguments.rounds):
                for name, measure, scale in (
                    ("end_to_end_groups_per_s", end_to_end, (arguments.groups,)),
                    ("one_stage_groups_per_s", one_stage, (arguments.groups,)),
                    ("one_stage_floor_groups_per_s", one_stage_floor, (arguments.groups,)),
                    ("claim_us", claims, (arguments.pending, 1000)),
                    ("claim_floor_us", claims_floor, (arguments.pending, 1000)),
                ):
                    async with connect(url, f"{name}-{turn}") as connection:
                        result = await measure(connection, *scale)
                        await connection.redis.flushall()
                    for suffix, value in zip(
                        ("", "_in_server"), result if isinstance(result, tuple) else (result,), strict=False
                    ):
                        seen.setdefault(name + suffix, []).append(value)
    return {name: round(statistics.median(values), 1) for name, values in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=600)
    parser.add_argument("--pending", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    result = {"group_kib": round(len(encode(make_group("p"))) / 1024, 1), "pending": arguments.pending}
    result |= anyio.run(bench, arguments)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:32} {value:>10}")


if __name__ == "__main__":
    main()
