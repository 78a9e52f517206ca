"""A run keeps one identity in its folder and on its server; a process with another one is refused before it claims."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from stream.connection.keys import LAYOUT
from stream.connection.run_connection import connect
from stream.connection.run_identity import read_identity, read_server_identity
from stream.errors import RunMismatchError
from stream.queue.stage import RetryPolicy, Stage
from stream.trainer.consume import consume, open_consumer, open_trainer_lease
from stream.trainer.leased_group import ResumePoint
from stream.trainer.ledger_records import read_events, read_ledger
from workers.feed.worker import feed
from workers.launch.role_process import run_role
from workers.launch.start import supervise
from workers.role.context import WorkerContext
from workers.role.exit_codes import ExitCode
from workers.runs.folder import write_settings
from workers.runs.identity import begin_run, check_folder, flat_settings, join_run
from workers.runs.summary import RunSummary, Staleness
from workers.settings import Settings
from workers.settings.toml_file import dump_settings, parse_settings

pytestmark = pytest.mark.usefixtures("preloaded")

TABLE = {"model": {"path": "m"}, "rollout": {"group_size": 4}, "queue": {"lease_s": 1.0}}


@pytest.fixture
def make(tmp_path, run_name, redis_url):
    """Write a user's folder and return its settings; all have one run name and one server."""

    def make(home="home", rows=40, reward="return [1.0]", **keys) -> Settings:
        folder = tmp_path / home
        folder.mkdir(exist_ok=True)
        (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(rows)))
        (folder / "reward.py").write_text(f"def exact(completions): {reward}\n")
        run = {"name": run_name, "folder": str(folder / "run"), "redis": redis_url} | keys.pop("run", {})
        data = {"path": str(folder / "train.jsonl")}
        return parse_settings(
            TABLE | {"run": run, "data": data, "rewards": [{"ref": f"{folder / 'reward.py'}:exact"}]} | keys
        )

    return make


async def start(connection, settings: Settings) -> None:
    """Do what `penstock run` does before it starts a process."""
    await anyio.Path(settings.folder).mkdir(exist_ok=True)
    check = await anyio.to_thread.run_sync(check_folder, settings)
    await begin_run(connection, settings, check)


async def everything(connection) -> dict[bytes, bytes | None]:
    keys = sorted([key async for key in connection.redis.scan_iter(f"{{{connection.run}}}*")])
    return {key: await connection.redis.dump(key) for key in keys if not key.endswith(b":wake")}


async def feed_until_done(connection, settings: Settings) -> None:
    """Run the feeder until it has fed everything."""
    context = WorkerContext(settings=settings, connection=connection, consumer="f", stopping=anyio.Event())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed, context)
        with anyio.fail_after(10):
            while (await connection.read_hash("feed")).get("done") != "1":
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


async def queued(connection) -> list[str]:
    entries = await connection.redis.xrange(connection.key("prompts"))
    return [fields[b"prompt"].decode() for _, fields in entries]


async def test_a_second_run_of_the_same_name_is_refused_before_it_does_anything(make, connection):
    first, second = make("first"), make("second")
    await start(connection, first)
    before = await everything(connection)
    with pytest.raises(
        RunMismatchError, match=r"has a run named .* already, \w{8}, and this folder is new: .*run\.name"
    ):
        await start(connection, second)
    assert not (second.folder / "identity.json").exists()
    other = make("second", run={"seed": 7})
    for role in ("feed", "rollout", "score", "train"):  # started one by one, in a folder of their own or in none
        with pytest.raises(RunMismatchError, match=r"run\.seed is 0 there and 7 here"):
            await join_run(connection, other, role)
    with pytest.raises(RunMismatchError, match="this folder is new"):
        async with open_trainer_lease(connection, second.folder):
            pass
    assert await everything(connection) == before


async def test_two_folders_with_one_name_are_told_apart_by_every_role(make, connection, redis_url, run_name):
    first, second = make("first"), make("second")
    await start(connection, first)
    async with connect(redis_url, f"{run_name}-elsewhere") as elsewhere:
        await start(elsewhere, second)
    before = await everything(connection)
    with pytest.raises(RunMismatchError, match=r"and this folder's run is \w{8}: give this run another"):
        await start(connection, second)
    for role in ("feed", "rollout", "score", "train"):
        with pytest.raises(RunMismatchError, match="this folder's run is"):
            await join_run(connection, second, role)
    with pytest.raises(RunMismatchError, match="this folder's run is"):
        async with consume(connection, second.folder / "ledger.jsonl"):
            pass
    assert await everything(connection) == before


def test_a_role_of_another_run_exits_permanently_and_claims_nothing(make, redis_url, run_name, tmp_path, capsys):
    ours, theirs = make("ours"), make("theirs", run={"seed": 7})
    anyio.run(partial(_on, redis_url, run_name, start, ours))
    (tmp_path / "theirs.toml").write_text(dump_settings(theirs))
    code = run_role("score", tmp_path / "theirs.toml", (), "", ())
    assert code == ExitCode.PERMANENT
    assert "error: the server of run" in (told := capsys.readouterr().err)
    assert "run.seed is 0 there and 7 here. Put back what was there, or start a new run" in told


def test_a_role_with_another_arrangement_of_keys_claims_nothing(
    make, redis_url, run_name, tmp_path, capsys, monkeypatch
):
    ours = make("ours")
    anyio.run(partial(_on, redis_url, run_name, start, ours))
    (tmp_path / "ours.toml").write_text(dump_settings(ours))
    monkeypatch.setattr("workers.runs.identity.LAYOUT", LAYOUT + 1)
    code = run_role("score", tmp_path / "ours.toml", (), "", ())
    assert code == ExitCode.PERMANENT
    told = capsys.readouterr().err
    assert f"penstock.keys is {LAYOUT} there and {LAYOUT + 1} here; another version of Penstock started it" in told


async def _on(url, name, call, *arguments):
    async with connect(url, name) as connection:
        return await call(connection, *arguments)


async def test_a_second_feeder_with_another_seed_or_file_is_refused(make, connection):
    first = make("first")
    await join_run(connection, first, "feed")  # a feeder alone, without a folder
    assert not first.folder.exists()
    await feed_until_done(connection, first)
    before = await everything(connection)
    with pytest.raises(RunMismatchError, match=r"run\.seed is 0 there and 7 here"):
        await join_run(connection, make("second", run={"seed": 7}), "feed")
    with pytest.raises(RunMismatchError, match=r"data\.rows\.train is 40 rows .* there and 39 rows"):
        await join_run(connection, make("second", rows=39), "feed")
    await join_run(connection, make("elsewhere"), "feed")  # the same rows, in another folder
    assert await everything(connection) == before


async def test_roles_that_are_started_one_by_one_use_one_commit(make, connection, monkeypatch):
    """The first role that needs the hub's model looks up its branch; the others do not ask, though it has moved."""
    commits, downloaded = iter(["1" * 40, "2" * 40]), []
    monkeypatch.setattr("workers.hub.names.look_up", lambda *_: next(commits))
    monkeypatch.setattr("workers.hub.names.download", lambda _, revision, *__: downloaded.append(str(revision)))
    model = {"path": "owner/name"}
    sampled = await join_run(connection, make("before", model=model), "rollout")  # it needs no file of the model
    trained = await join_run(connection, make("trainer", model=model), "train")
    again = await join_run(connection, make("restarted", model=model), "train")
    later = await join_run(connection, make("later", model=model), "rollout")
    assert [each.model.revision for each in (sampled, trained, again, later)] == ["", *[f"main@{'1' * 40}"] * 3]
    assert downloaded == [f"main@{'1' * 40}"] * 2
    with pytest.raises(
        RunMismatchError, match=r"model\.revision: .* at v2, commit 2{12}, and this run began with main"
    ):
        await join_run(connection, make("other", model=model | {"revision": "v2"}), "train")


async def test_the_same_rows_in_other_bytes_start_again(make, connection):
    settings = make()
    await start(connection, settings)
    await feed_until_done(connection, settings)
    before = await read_server_identity(connection)
    file = anyio.Path(settings.data.path)
    await file.write_text((await file.read_text()).rstrip("\n"))
    await start(connection, settings)
    await join_run(connection, settings, "feed")
    await join_run(connection, make("elsewhere"), "feed")  # with the last newline, in no folder
    after = await read_server_identity(connection)
    assert after == before
    assert (await connection.read_hash("feed"))["done"] == "1"
    async with open_trainer_lease(connection, settings.folder):
        pass
    assert (await anyio.to_thread.run_sync(read_identity, settings.folder)).fixed == before.fixed


def test_a_start_that_the_server_refuses_changes_no_file_and_raises_one_error(make, redis_url, run_name):
    settings = make(engine={"urls": ["http://127.0.0.1:1"]})
    settings.folder.mkdir()
    anyio.run(partial(_on, redis_url, run_name, start, settings))
    write_settings(settings)
    (settings.folder / "summary.json").write_text("{}")
    before = {file.name: file.read_bytes() for file in settings.folder.iterdir()}
    anyio.run(partial(_on, redis_url, run_name, _set, "run.seed", "6"))
    with pytest.raises(RunMismatchError, match=r"the server of run .* run\.seed is 6 there and 0 here"):
        supervise(make(engine={"urls": ["http://127.0.0.1:2"]}), quiet=True)
    after = {file.name: file.read_bytes() for file in settings.folder.iterdir() if file.is_file()}
    assert {name: after[name] for name in before} == before


async def _set(connection, name: str, value: str) -> None:
    """Change what the server knows about the run."""
    await connection.redis.hset(connection.key("identity"), name, value)


async def test_a_start_that_meets_other_rows_on_the_server_is_refused_and_changes_nothing(make, connection):
    settings = make()
    await start(connection, settings)
    await connection.redis.delete(connection.key("identity"))
    await join_run(connection, make("other", rows=41), "feed")  # alone, in no folder
    folder, server = (settings.folder / "identity.json").read_bytes(), await everything(connection)
    with pytest.raises(RunMismatchError, match=r"data\.rows\.train is 41 rows .* there and 40 rows"):
        await start(connection, settings)
    assert (settings.folder / "identity.json").read_bytes() == folder
    assert await everything(connection) == server


async def test_a_change_of_settings_and_code_reaches_folder_and_ledger_once(make, connection):
    settings = make()
    await start(connection, settings)
    changed = make(reward="return [0.5]", rollout={"group_size": 2})
    flat = await anyio.to_thread.run_sync(flat_settings, changed)
    stage = Stage(connection, "scored", "trainer", RetryPolicy(lease_s=1.0))
    ledger = settings.folder / "ledger.jsonl"
    for _ in range(2):
        await start(connection, changed)
        with capture_logs() as logs:
            async with (
                open_trainer_lease(connection, settings.folder, 1.0, flat) as (lease, lock),
                open_consumer(lease, lock, stage, ledger, ResumePoint(step=7), lambda group, _: group) as consumer,
            ):
                await consumer.checkpoint(lambda _: None)
    assert "setting.changed" not in [line["event"] for line in logs]
    events = await anyio.to_thread.run_sync(read_events, ledger)
    assert [(event.event, event.step, event.details["name"]) for event in events] == [
        ("setting_changed", 7, "rewards.exact.code"),
        ("setting_changed", 7, "rollout.group_size"),
    ]
    assert (events[1].details["before"], events[1].details["after"]) == ("4", "2")
    assert (await anyio.to_thread.run_sync(read_ledger, ledger))[1] == []


async def test_an_emptied_server_takes_the_folders_identity(make, connection):
    settings = make()
    await start(connection, settings)
    before = await read_server_identity(connection)
    await connection.redis.delete(connection.key("identity"))
    await join_run(connection, settings, "rollout")
    assert await read_server_identity(connection) == before
    await connection.redis.delete(connection.key("identity"))
    async with open_trainer_lease(connection, settings.folder):
        assert await read_server_identity(connection) == before


async def test_a_folder_that_lost_its_identity_takes_that_of_its_private_server_only(make, connection):
    settings, private = make(), make(run={"redis": ""})
    await start(connection, private)
    before = await anyio.to_thread.run_sync(read_identity, settings.folder)
    (settings.folder / "identity.json").unlink()
    with pytest.raises(RunMismatchError, match="this folder is new"):
        await start(connection, settings)
    await start(connection, private)
    assert await anyio.to_thread.run_sync(read_identity, settings.folder) == before


async def test_a_trainer_alone_gives_the_run_its_identity_and_moves_only_with_its_folder(make, connection, tmp_path):
    async with consume(connection, tmp_path / "one" / "ledger.jsonl"):
        born = await read_server_identity(connection)
    assert born.id
    assert (await anyio.to_thread.run_sync(read_identity, tmp_path / "one")).id == born.id
    (tmp_path / "one").rename(tmp_path / "moved")  # to another host
    async with consume(connection, tmp_path / "moved" / "ledger.jsonl"):
        assert await read_server_identity(connection) == born
    with pytest.raises(RunMismatchError, match="this folder is new"):
        async with consume(connection, tmp_path / "empty" / "ledger.jsonl"):
            pass


@pytest.mark.parametrize("finished", [False, True])
def test_penstock_run_names_the_change_with_one_line_and_leaves_the_folder_as_it_was(make, tmp_path, finished):
    settings = make()
    settings.folder.mkdir()
    anyio.run(partial(_on, settings.run.redis, settings.run.name, start, settings))
    if finished:
        write_settings(settings)
        summary = RunSummary(
            finished=True, steps=1, groups_trained=1, groups_dropped={}, completion_states={}, staleness=Staleness(),
            tokens_per_second=1.0, seconds=1.0, fed=1, outstanding=0, dead=0, duplicates=0,
        )  # fmt: skip
        (settings.folder / "summary.json").write_bytes(msgspec.json.encode(summary))
    (tmp_path / "file.toml").write_text(dump_settings(make()))
    make(rows=39)
    before = {file.name: file.read_bytes() for file in settings.folder.iterdir()}
    command = [sys.executable, "-P", "-m", "penstock", "run", "--no-check", str(tmp_path / "file.toml")]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=dict(os.environ), timeout=60, check=False
    )
    assert done.returncode == ExitCode.FAILURE
    assert done.stderr.count("\n") == 1
    assert "data.rows.train is 40 rows of digest" in done.stderr
    after = {file.name: file.read_bytes() for file in settings.folder.iterdir() if file.name != "supervisor.lock"}
    assert after == before
