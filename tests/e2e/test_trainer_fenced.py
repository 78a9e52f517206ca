"""A trainer that was suspended until its lease expired resumes in the middle of an operation and changes nothing."""

import json
import os
import sys
from pathlib import Path

import anyio
import pytest
import tomli_w

from stream.connection.run_connection import connect
from stream.operator.status import read_status
from stream.queue.feed import Feed
from stream.records import Completion, Group, Prompt
from stream.validity import Measured
from tests.cases.rows import sampled_row
from tests.e2e.by_hand import Cast, Role, cast, until
from tests.scripted_engine.engine import ScriptedEngine
from tests.soak import project, witness
from workers.role.exit_codes import ExitCode
from workers.train.checkpointing.checkpoint import CheckpointStore

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("preloaded")]

ROWS, MORE = 12, 6
GROUPS_PER_STEP, EVERY = 2, 3


class Run:
    """A run whose groups are scored already, so that only trainers have work."""

    def __init__(self, folder: Path, name: str, redis: str) -> None:
        self.folder, self.redis = folder, redis
        settings = project.write_project(folder, ROWS + MORE, 0)
        table = {
            "run": {"name": name, "folder": str(folder / "run")},
            "model": {"path": settings.model.path},
            "data": {"path": settings.data.path},
            "rewards": [{"ref": settings.rewards[0].ref}],
            "rollout": {"group_size": 2, "max_tokens": 16, "max_tokens_per_turn": 16},
            "train": {"batch_size": GROUPS_PER_STEP, "save_every": EVERY},
            "queue": {"lease_s": 1.0},
        }
        self.file = folder / "run_me.toml"
        self.file.write_text(tomli_w.dumps(table))
        self.fifo = folder / witness.FIFO
        os.mkfifo(self.fifo)

    def trainer(self, engine: ScriptedEngine, file: Path, learner: type[witness.Witness]) -> list[str]:
        role = (project.ROLE_PROGRAM, "train", "--learner", learner.__name__, str(file))
        return [sys.executable, *role, "--redis", self.redis, "--engine", engine.url]

    def ledger(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / "run" / "ledger.jsonl").read_text().splitlines()]

    def state(self) -> dict[str, bytes]:
        """Return the files that a later trainer starts from: ledger, metrics, named checkpoints; no temporary ones.

        It does not enter `weights`, whose old versions the trainer removes meanwhile.
        """
        found: dict[str, bytes] = {}
        for place, folders, names in os.walk(self.folder / "run"):
            folders[:] = [name for name in folders if name != "weights" and not name.startswith(".")]
            paths = [Path(place, name) for name in names if not name.startswith(".")]
            found |= {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}
        return found


@pytest.fixture
async def run(tmp_path, run_name, redis_url):
    return await anyio.to_thread.run_sync(Run, tmp_path, run_name, redis_url)


@pytest.fixture
async def connection(redis_url, run_name):
    async with connect(redis_url, run_name, reconnect_s=30.0) as result:
        yield result


async def scored(pipe, rows: range) -> None:
    feed = Feed(pipe.connection, 1000)
    prompts = [Prompt(id=f"prompts:0:{row}", messages=[], group_size=2) for row in rows]
    await feed.put(prompts, await feed.cursor(), str(rows.stop))
    for stage, into in (("prompts", "groups"), ("groups", "scored")):
        worker = pipe.stage(stage, f"passing-{stage}")
        for lease in (await worker.claim(len(rows))).leases:
            await worker.complete(lease, into, _group(lease.prompt_id))


def _group(prompt_id: str) -> Group:
    row = sampled_row([1, project.END], [-0.5] * 2, prompt=[7])
    both = [Completion(index=i, rows=[row], reward=Measured(float(i))) for i in range(2)]
    return Group(prompt=Prompt(id=prompt_id, messages=[], group_size=2), completions=both)


async def suspend_at(run: Run, point: str, engine: ScriptedEngine, roles: Cast) -> tuple[Role, int]:
    """Suspend a trainer at this point; returns it and the open pipe that unblocks it after it resumes."""
    await anyio.Path(run.folder / witness.STOP_AT).write_text(point)
    trainer = await roles.start(run.trainer(engine, run.file, witness.StoppingWitness))
    with anyio.fail_after(60):
        descriptor = await anyio.to_thread.run_sync(os.open, run.fifo, os.O_WRONLY, abandon_on_cancel=True)
    trainer.suspend()
    return trainer, descriptor


async def all_published(connection) -> bool:
    """Whether every prompt fed is trained and published to the engines."""
    status = await read_status(connection)
    return status.counts.get("trained", 0) == ROWS and status.outstanding == 0


@pytest.mark.parametrize(
    "point",
    [pytest.param("step:4", marks=pytest.mark.full), pytest.param("weights:4", marks=pytest.mark.full), "model:6"],
)
async def test_a_suspended_trainer_that_was_replaced_changes_nothing(run, connection, pipe_on, tmp_path, point):
    pipe = pipe_on(connection)
    await scored(pipe, range(ROWS))
    async with ScriptedEngine(lambda ids, _: ids, version=None) as engine, cast(tmp_path) as roles:
        zombie, descriptor = await suspend_at(run, point, engine, roles)
        # Three groups a step instead of the zombie's two, so that its writes would be visible.
        heir = await roles.start(run.trainer(engine, await three_a_step(run), witness.Witness))
        await heir.says("trainer.started")
        await until(connection, lambda: all_published(connection))
        before, pushes = await anyio.to_thread.run_sync(run.state), list(engine.pushes)
        os.close(descriptor)
        zombie.go_on()
        assert await zombie.ended() == ExitCode.PERMANENT
        assert "another trainer has taken over" in zombie.said()
        assert await anyio.to_thread.run_sync(run.state) == before
        assert engine.pushes == pushes
        versions = [int(version) for _, version in pushes]
        assert versions == sorted(set(versions))

        await scored(pipe, range(ROWS, ROWS + MORE))
        await Feed(connection, 1000).finish()
        assert await heir.ended() == 0, heir.said()
    ends = [line["prompt"] for line in await anyio.to_thread.run_sync(run.ledger) if "prompt" in line]
    assert len(ends) == len(set(ends)) == ROWS + MORE
    checkpoint = await anyio.to_thread.run_sync(CheckpointStore(run.folder / "run" / "checkpoints").latest)
    weights = await anyio.to_thread.run_sync(witness.testimony, checkpoint.model)
    assert weights.tolist() == [1.0] * (ROWS + MORE)


async def three_a_step(run: Run) -> Path:
    def write() -> Path:
        file = run.folder / "three.toml"
        file.write_text(run.file.read_text().replace("batch_size = 2", "batch_size = 3"))
        return file

    return await anyio.to_thread.run_sync(write)
