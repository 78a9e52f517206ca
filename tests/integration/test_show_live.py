"""`penstock show` on a run without an outcome yet reads its server and changes nothing there."""

import json
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner

from stream.codec import encode
from stream.connection.run_connection import connect
from stream.operator.status import read_status
from stream.operator.unfinished_groups import newest_scored_group
from stream.private_server import private_server
from stream.queue.stage import Stage
from stream.records import Group
from stream.trainer.archive import Archive
from stream.trainer.ledger_records import LedgerRecord, Trained, content_hash
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from tests.cases.records import dumped
from tests.cases.run_folders import write_run
from workers.cli import penstock
from workers.launch.watch import SampleSchedule


def archive(folder: Path, group: Group) -> None:
    written = Archive(folder)
    written.write([(LedgerRecord(group.prompt.id, Trained(), 1, 0, content_hash(group)), encode(group))])
    written.close()


async def test_unfinished_groups_are_shown_and_the_server_stays_as_it_is(pipe, run_name, redis_url, tmp_path):
    await pipe.scored("trained", "waiting")
    await pipe.rolled_out("unscored")
    lease = await TrainerLease.acquire(pipe.connection, 30.0)
    trainer: Stage = pipe.stage("scored", "trainer")
    (taken,) = (await trainer.claim(1)).leases
    await lease.commit(trainer, [EndedGroup(taken, Trained())], release_version=1)
    write_run(tmp_path, run_name, redis=redis_url)
    before = await dumped(pipe.connection)
    options = ["show", str(tmp_path), "--json", "-n", "9"]
    result = await anyio.to_thread.run_sync(CliRunner().invoke, penstock, options)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["prompt_id"], line["outcome"], line["step"]) for line in lines] == [
        ("waiting", "unfinished", None),
        ("unscored", "unfinished", None),
    ]
    groups = await anyio.to_thread.run_sync(
        CliRunner().invoke, penstock, ["groups", str(tmp_path), "--json", "-n", "1"]
    )
    assert [json.loads(line)["prompt_id"] for line in groups.stdout.splitlines()] == ["waiting"]
    newest = await newest_scored_group(pipe.connection)
    assert newest is not None
    assert newest.prompt.id == "waiting"
    samples, status = SampleSchedule(every_steps=5, min_interval_s=0.0), await read_status(pipe.connection)
    shown = []
    for step in range(8):
        status.policy["step"] = str(step)
        lines = await samples.next_sample(pipe.connection, status, 80)
        shown += [(step, lines[0].plain[:43])] if lines else []
    assert shown == [(step, f"── sample at step {step}: waiting #0, reward 1 ─") for step in (1, 6)]
    assert await dumped(pipe.connection) == before


async def test_a_killed_runs_own_server_is_read_if_nothing_is_archived(run_name, pipe_on, tmp_path):
    async with private_server(tmp_path / "redis") as url, connect(url, run_name, reconnect_s=5.0) as connection:
        await pipe_on(connection).scored("waiting")
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "{run_name}"\nfolder = "{tmp_path}"\n[model]\npath = "none"\n[data]\npath = "none"\n'
        '[[rewards]]\nref = "a:b"\n'
    )
    result = await anyio.to_thread.run_sync(CliRunner().invoke, penstock, ["show", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["prompt_id"] == "waiting"


@pytest.mark.timeout(30)
def test_a_server_that_is_gone_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.runs.run._RECONNECT_S", 0.1)
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "r"\nfolder = "{tmp_path}"\nredis = "unix://{tmp_path}/none.sock"\n[model]\npath = "none"\n'
        '[data]\npath = "none"\n[[rewards]]\nref = "a:b"\n'
    )
    result = CliRunner().invoke(penstock, ["show", str(tmp_path)])
    assert result.exit_code == 1
    assert "note: unfinished groups could not be read" in result.stderr
    assert "run 'r' has no completion yet" in result.stderr
