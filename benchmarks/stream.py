"""Groups through all three streams, compared to the same bytes by bare pipelined commands.

    python -m benchmarks.stream [--groups 400] [--rounds 5] [--backlogs 100 1000 10000 100000] [--json]

Three measurements, all on private servers on a unix socket with `appendfsync everysec`:

- **End to end.** Feed, claim, complete into `groups`, claim, complete into `scored`, claim, commit, acknowledge: groups
  of 16 completions of 1,000 tokens (134 KiB). The floor moves the same bytes through three streams with the same
  client: XREADGROUP of four entries, then one pipeline of XADD, XACK and XDEL. It has no owner, lease, count or
  atomicity, and neither encodes nor decodes; `floor_codec` also encodes and decodes as Penstock does. The contenders
  take turns. Beside groups per second, which another process on the machine changes, stand the CPU milliseconds that a
  group costs client and server.
- **Backlog.** Microseconds to claim and complete one small group, at the client and in the server, while 100 to 100,000
  other groups wait.
- **Memory.** What the server's memory grows by, per byte of the groups that are outstanding.

All roles are tasks of one process: on two cores, server and client have one each. Figures are medians of the rounds.
"""

import argparse
import json
import statistics
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import structlog

from stream.codec import decode, decode_group, encode
from stream.connection.run_connection import RunConnection, connect
from stream.private_server import private_server
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Completion, Group, Prompt, Row, Span
from stream.trainer.ledger_records import Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from stream.validity import Measured

AT_ONCE = 4
"""Tasks of a stage, and entries of a claim."""
BARE = "bare"
"""Consumer group of the floor."""
Figures = dict[str, float]


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


async def feed(connection: RunConnection, groups: int) -> None:
    prompts = [Prompt(id=f"p{i}", messages=[]) for i in range(groups)]
    for start in range(0, groups, 1000):
        batch = prompts[start : start + 1000]
        await Feed(connection, groups).put(batch, str(start or ""), str(start + len(batch)))


async def work(stage: Stage, left: list[int], do: Callable[[list], Awaitable[None]]) -> None:
    """Claim until the stage has processed all groups."""
    while left[0] > 0:
        claim = await stage.claim(min(AT_ONCE, left[0]))
        left[0] -= len(claim.leases)
        if claim.leases:
            await do(claim.leases)
        elif left[0] > 0:
            await stage.wait(claim, 0.1)


async def roll_out(connection: RunConnection, groups: int, made: Group) -> None:
    left, stage = [groups], Stage(connection, "prompts", "rollout", RetryPolicy(lease_s=600.0))

    async def do(leases):
        for lease in leases:
            await stage.complete(lease, "groups", made)

    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(work, stage, left, do)


async def score(connection: RunConnection, groups: int) -> None:
    left, stage = [groups], Stage(connection, "groups", "score", RetryPolicy())

    async def do(leases):
        for lease in leases:
            await stage.complete_scored(lease, decode_group(lease.payload, lease.scores))

    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(work, stage, left, do)


async def train(connection: RunConnection, groups: int) -> None:
    trainer_lease, marked = await TrainerLease.acquire(connection, 60.0), []

    async def do(leases):
        for lease in leases:
            decode_group(lease.payload, lease.scores)
        await trainer_lease.commit(stage, [EndedGroup(lease, Trained()) for lease in leases], release_version=1)
        marked.extend(lease.id for lease in leases)
        if len(marked) >= 64:
            await trainer_lease.acknowledge(marked)
            marked.clear()

    stage = Stage(connection, "scored", "train", RetryPolicy())
    await work(stage, [groups], do)
    await trainer_lease.acknowledge(marked)


async def penstock(connection: RunConnection, groups: int, made: Group) -> None:
    await feed(connection, groups)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(roll_out, connection, groups, made)
        tasks.start_soon(score, connection, groups)
        tasks.start_soon(train, connection, groups)


async def bare(connection: RunConnection, groups: int, made: Group, *, codec: bool) -> None:
    """Move the same bytes through three streams by commands without a script."""
    redis, names, payload = connection.redis, ["bare:prompts", "bare:groups", "bare:scored"], encode(made)
    prompt = encode(made.prompt)
    for name in names:
        await redis.xgroup_create(name, BARE, id="0", mkstream=True)
    for start in range(0, groups, 1000):
        fed = redis.pipeline(transaction=False)
        for _ in range(start, min(groups, start + 1000)):
            fed.xadd(names[0], {"prompt": "p", "payload": prompt})
        await fed.execute()

    def out(place: int, fields: dict[bytes, bytes]) -> bytes:
        if place == 0:
            return encode(made) if codec else payload
        return encode(decode(fields[b"payload"], Group)) if codec else fields[b"payload"]

    async def move(place: int, left: list[int]) -> None:
        source, sink = names[place], names[place + 1 : place + 2]
        while left[0] > 0:
            read = await redis.xreadgroup(BARE, "w", {source: ">"}, count=min(AT_ONCE, left[0]), block=100)
            entries = read[0][1] if read else []
            left[0] -= len(entries)
            changes = redis.pipeline(transaction=False)
            for entry, fields in entries:
                if sink:
                    changes.xadd(sink[0], {"prompt": "p", "payload": out(place, fields)})
                elif codec:
                    decode(fields[b"payload"], Group)
                changes.xack(source, BARE, entry)
                changes.xdel(source, entry)
            await changes.execute()

    async with anyio.create_task_group() as tasks:
        for place, workers in enumerate((AT_ONCE, AT_ONCE, 1)):
            left = [groups]
            for _ in range(workers):
                tasks.start_soon(move, place, left)


async def bare_without_codec(connection: RunConnection, groups: int, made: Group) -> None:
    await bare(connection, groups, made, codec=False)


async def bare_with_codec(connection: RunConnection, groups: int, made: Group) -> None:
    await bare(connection, groups, made, codec=True)


CONTENDERS = {"penstock": penstock, "floor": bare_without_codec, "floor_codec": bare_with_codec}


async def server_seconds(connection: RunConnection) -> float:
    """CPU seconds of the server's main thread, which runs every command."""
    used = await connection.redis.info("cpu")
    return float(used["used_cpu_user_main_thread"]) + float(used["used_cpu_sys_main_thread"])


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    result: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    yield result
    result |= {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


async def race(url: str, groups: int, rounds: int) -> dict[str, Figures]:
    """Run the contenders in turns; the first round warms up."""
    made = make_group("p")
    seen: dict[str, list[Figures]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds + 1):
        for name, contender in CONTENDERS.items():
            async with connect(url, f"{name}-{turn}") as connection:
                before = await server_seconds(connection)
                with stopwatch() as took:
                    await contender(connection, groups, made)
                server = await server_seconds(connection) - before
                await connection.redis.flushall()
            if turn:
                seen[name].append(
                    {
                        "groups_per_s": groups / took["wall_s"],
                        "client_ms_per_group": 1e3 * took["cpu_s"] / groups,
                        "server_ms_per_group": 1e3 * server / groups,
                    }
                )
    ratios = [a["groups_per_s"] / b["groups_per_s"] for a, b in zip(seen["penstock"], seen["floor"], strict=True)]
    return {name: medians(values) for name, values in seen.items()} | {
        "share_of_floor": {
            "median": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }
    }


def medians(values: list[Figures]) -> Figures:
    return {name: round(statistics.median(each[name] for each in values), 3) for name in values[0]}


async def at_backlog(url: str, backlog: int, count: int) -> Figures:
    """Claim and complete `count` small groups while `backlog` more wait in each of prompts and groups."""
    made = make_group("p", completions=1, tokens=16)
    async with connect(url, f"backlog-{backlog}") as connection:
        await feed(connection, 2 * backlog + count)
        await roll_out(connection, backlog, made)
        prompts = Stage(connection, "prompts", "w", RetryPolicy(lease_s=600.0))
        groups = Stage(connection, "groups", "w", RetryPolicy(lease_s=600.0))
        before = await server_seconds(connection)
        with stopwatch() as took:
            for _ in range(count):
                for stage, sink in ((prompts, "groups"), (groups, "scored")):
                    claim = await stage.claim(1)
                    await stage.complete(claim.leases[0], sink, made)
        server = await server_seconds(connection) - before
        await connection.redis.flushall()
    return {
        "client_us": round(1e6 * took["cpu_s"] / count, 1),
        "server_us": round(1e6 * server / count, 1),
        "wall_us": round(1e6 * took["wall_s"] / count, 1),
    }


async def memory(url: str, groups: int) -> Figures:
    made = make_group("p")
    async with connect(url, "memory") as connection:
        before = (await connection.redis.info("memory"))["used_memory"]
        await feed(connection, groups)
        await roll_out(connection, groups, made)
        after = (await connection.redis.info("memory"))["used_memory"]
        await connection.redis.flushall()
    payload = groups * len(encode(made))
    return {"outstanding_mb": round(payload / 1e6, 1), "bytes_per_payload_byte": round((after - before) / payload, 3)}


async def bench(options: argparse.Namespace) -> dict[str, object]:
    result: dict[str, object] = {"group_kib": round(len(encode(make_group("p"))) / 1024, 1)}
    with tempfile.TemporaryDirectory() as folder:
        async with private_server(Path(folder)) as url:
            result |= await race(url, options.groups, options.rounds)
            rounds = [{b: await at_backlog(url, b, 1000) for b in options.backlogs} for _ in range(options.rounds)]
            result["backlog"] = {b: medians([each[b] for each in rounds]) for b in options.backlogs}
            result["memory"] = await memory(url, options.groups)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backlogs", type=int, nargs="*", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    print(json.dumps(anyio.run(bench, options), indent=None if options.json else 2))


if __name__ == "__main__":
    main()
