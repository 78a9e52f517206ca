"""Two data sets, three environments, one run: the feeder restarts once, a real worker rolls out."""

import json
import subprocess
from collections import Counter

import anyio

from stream.operator.status import read_status
from tests.e2e.harness import environment
from tests.integration.test_recycling import worker
from tests.scripted_engine.engine import ScriptedEngine
from tests.soak.project import END, write_project
from workers.datasets.mix import open_dataset_mix
from workers.feed import worker as feeding
from workers.feed.worker import feed
from workers.role.context import WorkerContext
from workers.settings.toml_file import dump_settings, parse_settings

WORLDS = """
class World:
    kind = 0

    def reset(self, seed, completion_seed, completion_index, value, **row):
        self.seed, self.own, self.index, self.value = seed, completion_seed, completion_index, value

    def get_reward(self):
        return {"kind": self.kind, "seed": self.seed, "own": self.own, "index": self.index, "value": self.value}

class Red(World):
    kind = 1

class Green(World):
    kind = 2

class Blue(World):
    kind = 3
"""


async def test_a_dataset_mix_fed_across_a_restart_reaches_each_rows_environment_once(
    tmp_path, pipe, redis_url, run_name, monkeypatch
):
    monkeypatch.setattr(feeding, "_BATCH", 5)
    write_project(tmp_path, 1, seed=1)
    (tmp_path / "worlds.py").write_text(WORLDS)
    rows = {
        "even": [{"prompt": "2", "value": i} for i in range(6)],
        "odd": [{"prompt": "3", "worth": i, "environment": "blue" if i == 1 else "red"} for i in range(3)],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    mix = [
        {"path": str(tmp_path / "even.jsonl"), "environment": "green", "weight": 2},
        {"path": str(tmp_path / "odd.jsonl"), "columns": {"value": "worth"}, "weight": 2},
    ]
    settings = parse_settings(
        {
            "run": {"name": run_name, "folder": str(tmp_path / "run"), "redis": redis_url},
            "model": {"path": str(tmp_path / "model")},
            "data": {"sets": mix, "max_queued_prompts": 4},
            "environments": {each.lower(): f"{tmp_path}/worlds.py:{each}" for each in ("Red", "Green", "Blue")},
            "rollout": {"group_size": 2, "max_tokens": 8, "max_tokens_per_turn": 8},
            "train": {"batch_size": 50},
        }
    )
    file = tmp_path / "run.toml"
    file.write_text(dump_settings(settings))
    role = WorkerContext(
        settings=settings, connection=pipe.connection, consumer="feed", stopping=pipe.connection.stopping
    )
    total = 12  # six of each: the three odd rows are fed twice

    async def until(condition, within_s=30) -> None:
        with anyio.fail_after(within_s):
            while not await condition():
                await anyio.sleep(0.02)

    async def is_full() -> bool:
        known = await pipe.connection.read_hash("meta")
        return bool(known) and (await read_status(pipe.connection)).counts.get("fed", 0) == 5

    async def is_rolled_out() -> bool:
        return (await read_status(pipe.connection)).stages["groups"].lag == total

    async with anyio.create_task_group() as first_life:
        first_life.start_soon(feed, role)
        await until(is_full)  # it waits for capacity, in the middle of both sets
        first_life.cancel_scope.cancel()
    async with (
        ScriptedEngine(lambda prompt_ids, _: [*prompt_ids, END], version="0") as engine,
        await anyio.open_process(
            worker(file, redis_url, engine.url),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
        ) as process,
        anyio.create_task_group() as second_life,
    ):
        second_life.start_soon(feed, role)
        await until(is_rolled_out)
        second_life.cancel_scope.cancel()
        process.terminate()
        await process.wait()

    groups = [lease.group() for lease in (await pipe.stage("groups").claim(100)).leases]
    expected, _ = await anyio.to_thread.run_sync(lambda: open_dataset_mix(settings).read_prompts(0, 100))
    assert sorted(group.prompt.id for group in groups) == sorted(prompt.id for prompt in expected)
    assert Counter(group.prompt.id.split(":")[0] for group in groups) == {"even": 6, "odd": 6}
    kinds = {"red": 1.0, "green": 2.0, "blue": 3.0}
    for group in groups:
        name, _, number = group.prompt.id.split(":")
        assert group.prompt.environment == ("green" if name == "even" else "blue" if number == "1" else "red")
        for completion in group.completions:
            parts = {part.name: part.reward.value for part in completion.parts}
            assert parts["env.kind"] == kinds[group.prompt.environment]
            assert parts["env.value"] == int(number)
            assert parts["env.index"] == completion.index
            assert parts["env.seed"] == group.prompt.seed  # the group's, so that all are posed one problem
            assert parts["env.own"] == group.prompt.seed + completion.index
    seeds = {part.reward.value for g in groups for c in g.completions for part in c.parts if part.name == "env.own"}
    assert len(seeds) == 2 * total
