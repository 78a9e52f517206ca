"""`penstock queues` finds a run and reads its status without changing it."""

import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import anyio
import pytest
from redis import Redis

from stream.connection.keys import key_prefix
from stream.connection.run_connection import connect
from stream.connection.run_identity import RunIdentity, compare_with_server, write_identity
from stream.errors import PenstockError, RunMismatchError, ServerError, SettingsError
from stream.operator.status import read_status
from stream.private_server import private_server
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Group, Prompt
from workers.cli.operate import send_command
from workers.runs.dead_letters import LetterChoice
from workers.runs.find import open_run
from workers.runs.live_run import LiveRun, write_live
from workers.runs.run import Run
from workers.settings.toml_file import dump_settings, parse_settings
from workers.terminal import queues
from workers.terminal.dead_letters import drop_dead, retry_dead
from workers.terminal.queues import show_queues, watch

pytestmark = pytest.mark.usefixtures("silent_logs")

TERMS = RetryPolicy()
STAGE_KEYS = {"depth", "claimed", "delayed", "lag", "oldest_age_s", "rate", "consumers"}
KEYS = {
    "run", "at", "stages", "fed", "trained", "dropped", "dropped_by_reason", "dead", "outstanding",
    "groups_outstanding", "capacity", "version", "step", "dead_letters", "duplicates", "cancelled", "finished",
    "paused_by", "paused_at", "evaluation", "rows", "truncated", "status_id", "bottleneck", "disk", "memory",
}  # fmt: skip


def make_folder(folder: Path, name: str, redis: str = "") -> Path:
    folder.mkdir(parents=True)
    table = {"run": {"name": name, "folder": str(folder), "redis": redis}, "model": {"path": "m"}}
    settings = parse_settings(table | {"data": {"path": "d"}, "rewards": [{"ref": "a:b"}]})
    (folder / "run.toml").write_text(dump_settings(settings))
    return folder


async def some_work(connection) -> None:
    """Feed four prompts: one rolled out, one claimed, one released, one waiting."""
    await connection.write_hash("meta", {"capacity": "8"})
    await Feed(connection, 10).put([Prompt(id=name, messages=[]) for name in "abcd"], "", "4")
    stage = Stage(connection, "prompts", "rollout-1", TERMS)
    done, _held, back = (await stage.claim(3)).leases
    await stage.complete(done, "groups", Group(prompt=Prompt(id="a", messages=[]), completions=[]))
    await stage.release(back, "infra", "the engine said no")


async def in_thread(target, redis, *, as_json=False) -> None:
    """Run the command in a thread, because it runs an event loop."""
    run = await anyio.to_thread.run_sync(partial(open_run, target, redis, must_have_begun=True))
    await anyio.to_thread.run_sync(partial(show_queues, run, as_json=as_json))


async def watched(target, redis) -> None:
    await anyio.to_thread.run_sync(partial(watch, target, redis, in_flight=False, stuck_s=60.0, as_json=True))


async def test_json_has_these_keys_and_counts(connection, redis_url, run_name, capsys):
    await some_work(connection)
    await in_thread(run_name, redis_url, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert set(report) == KEYS
    assert {stage: set(facts) for stage, facts in report["stages"].items()} == dict.fromkeys(
        ("prompts", "groups", "scored"), STAGE_KEYS
    )
    prompts = report["stages"]["prompts"]
    assert (prompts["depth"], prompts["claimed"], prompts["delayed"], prompts["lag"]) == (3, 1, 1, 1)
    assert prompts["consumers"] == {"rollout-1": 1}
    assert report["stages"]["groups"]["depth"] == 1
    assert (report["fed"], report["outstanding"], report["groups_outstanding"], report["capacity"]) == (4, 4, 2, 8)
    assert report["fed"] == report["trained"] + report["dropped"] + report["dead"] + report["outstanding"]
    assert (report["version"], report["finished"]) == (-1, "")
    assert len(report["status_id"]) == 16
    bottleneck = report["bottleneck"]
    assert (bottleneck["limit"], bottleneck["figures"]["waiting"]) == ("rollout workers", 2)


async def test_the_table_shows_the_same_counts(connection, redis_url, run_name, capsys):
    await some_work(connection)
    await in_thread(run_name, redis_url)
    output = capsys.readouterr().out
    assert "limited by rollout workers: 1 group at 1 rollout worker, 2 prompts waiting" in output
    assert "prompts held by  rollout-1  1" in output
    assert "fed 4 = trained 0 + dropped 0 + dead 0 + outstanding 4" in output
    assert "groups outstanding 2 of 8" in output


async def test_the_last_steps_completions_are_counted_by_reason(connection, redis_url, run_name, capsys):
    await some_work(connection)
    metrics = {
        "rows/valid": 12, "rows/failed:prompt_too_long": 1, "truncated/length": 3, "truncated/max_turns": 1,
        "truncated/reward_mean": 0.5, "truncated/length_mean": 7.0, "reward/mean": 1.0,
    }  # fmt: skip
    await connection.write_hash("latest", {"metrics": json.dumps(metrics)})
    await in_thread(run_name, redis_url, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == {"valid": 12, "failed:prompt_too_long": 1}
    assert report["truncated"] == {"length": 3, "max_turns": 1}
    await in_thread(run_name, redis_url)
    shown = " ".join(capsys.readouterr().out.split())
    assert "last step's completions: failed:prompt_too_long 1, valid 12" in shown
    assert "of them truncated: length 3, max_turns 1" in shown


async def test_reading_creates_and_changes_no_key(connection, redis_url, run_name):
    def contents(redis: Redis) -> dict[bytes, bytes]:
        """Of all keys but those of other tests' runs, some of which expire at any time."""
        ours = key_prefix(run_name).encode()
        keys = [key for key in redis.keys("*") if key.startswith(ours) or not key.startswith(b"{test-")]
        return {key: redis.dump(key) for key in keys}

    await some_work(connection)
    with Redis.from_url(redis_url) as redis:
        before = contents(redis)
        assert before
        await in_thread(run_name, redis_url, as_json=True)
        assert contents(redis) == before
        with pytest.raises(PenstockError, match="has no run named 'nobody'"):
            await in_thread("nobody", redis_url)
        assert contents(redis) == before


async def test_watching_ends_when_the_run_has_finished(connection, redis_url, run_name, capsys):
    await connection.write_hash("meta", {"finished": "trained 3 steps"})
    await watched(run_name, redis_url)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["finished"] == "trained 3 steps"


async def test_watching_begins_when_the_run_does(connection, redis_url, run_name, monkeypatch, capsys):
    monkeypatch.setattr(queues, "_WATCH_INTERVAL_S", 0.02)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(watched, run_name, redis_url))
        while "waiting for it to start" not in (told := capsys.readouterr()).err:
            await anyio.sleep(0.02)
        assert told.out == ""
        await anyio.sleep(0.2)  # it looks ten times
        await connection.write_hash("meta", {"finished": "stopped"})
    later = capsys.readouterr()
    assert (json.loads(later.out)["finished"], later.err) == ("stopped", "")


def announce_mine(run_name: str, redis_url: str) -> None:
    make_folder(Path("runs/other"), "other")
    write_live(make_folder(Path("runs/mine"), run_name), LiveRun(run=run_name, redis=redis_url, pid=1))


async def test_a_running_run_is_found_by_folder_name_file_or_alone(
    connection, redis_url, run_name, tmp_path, monkeypatch, capsys
):
    await some_work(connection)
    monkeypatch.chdir(tmp_path)
    await anyio.to_thread.run_sync(announce_mine, run_name, redis_url)
    for target in ("runs/mine", "mine", "runs/mine/run.toml", None):
        await in_thread(target, "", as_json=True)
        assert json.loads(capsys.readouterr().out)["run"] == run_name


async def test_a_stopped_private_server_is_started_for_the_command(tmp_path, capsys):
    folder = make_folder(tmp_path / "rests", "rests")
    async with private_server(folder / "redis") as url, connect(url, "rests") as connection:
        await some_work(connection)
    await in_thread(str(folder), "", as_json=True)
    assert json.loads(capsys.readouterr().out)["fed"] == 4


def test_the_server_may_be_named_in_the_settings(tmp_path, redis_url):
    folder = make_folder(tmp_path / "far", "far", redis_url)
    assert open_run(str(folder)).url == redis_url
    assert open_run(str(folder), "redis://elsewhere").url == "redis://elsewhere"


def test_what_reads_a_folder_takes_the_newest_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, name in ((300, "newest"), (600, "older")):
        written = time.time() - age
        os.utime(make_folder(Path("runs") / name, name) / "run.toml", (written, written))
    assert open_run().name == "newest"
    with pytest.raises(PenstockError, match=r"no run is active under runs/; .*such as runs/newest"):
        open_run(must_have_begun=True)


def test_an_unknown_run_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PenstockError, match="no run is active"):
        open_run(must_have_begun=True)
    with pytest.raises(PenstockError, match="mine is neither a run's folder"):
        open_run("mine", must_have_begun=True)
    folder = make_folder(Path("runs/mine"), "mine")
    with pytest.raises(PenstockError, match="has not begun"):
        open_run("mine", must_have_begun=True)
    (folder / "run.toml").write_text("[run]\n")
    with pytest.raises(SettingsError):
        open_run("mine", must_have_begun=True)


def test_two_running_runs_need_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write_live(make_folder(Path("runs") / name, name), LiveRun(run=name, redis="unix://x", pid=1))
    with pytest.raises(PenstockError, match="2 runs go on: runs/one, runs/two"):
        open_run(must_have_begun=True)


@pytest.mark.parametrize("runs", [False, True])
def test_ctrl_c_ends_a_watch_without_an_error(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def interrupt(*_args):
        raise KeyboardInterrupt

    if runs:
        monkeypatch.setattr("workers.terminal.queues._wait_for_run", lambda *_args: Run("soon"))
        monkeypatch.setattr(Run, "call", interrupt)
    else:
        monkeypatch.setattr("workers.terminal.queues.time.sleep", interrupt)
    watch("soon", "", in_flight=False, stuck_s=60.0)
    assert capsys.readouterr().err.count("\n") == (0 if runs else 1), "at most what it waits for"


@pytest.fixture
def temporary(request, monkeypatch):
    """A folder for temporary files with this name; its path is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        (Path(short) / request.param).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(Path(short) / request.param))
        yield


@pytest.mark.parametrize("temporary", ["a#b", "a%20b", "a?b", "a@b é"], indirect=True)
@pytest.mark.usefixtures("temporary")
async def test_a_private_server_is_reached_whatever_the_name_of_the_folder_for_temporary_files(tmp_path):
    async with private_server(tmp_path / "redis") as url, connect(url, "run", reconnect_s=1) as connection:
        assert await connection.ping()


@pytest.mark.parametrize("temporary", ["t" * 120], indirect=True)
@pytest.mark.usefixtures("temporary")
async def test_too_long_a_folder_for_temporary_files_is_an_error_with_its_remedy(tmp_path):
    with pytest.raises(ServerError, match="set TMPDIR to a shorter folder"):
        async with private_server(tmp_path / "redis"):
            pass


@pytest.fixture
def folder_of_another_run(redis_url, run_name, tmp_path):
    folder = make_folder(tmp_path / "mine", run_name, redis_url)
    write_identity(folder, RunIdentity(id="a" * 32))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda target, redis: send_command("stop", open_run(target, redis)), id="stop"),
        pytest.param(lambda target, redis: send_command("pause", open_run(target, redis)), id="pause"),
        pytest.param(lambda target, redis: drop_dead(open_run(target, redis), LetterChoice()), id="drop"),
        pytest.param(lambda target, redis: retry_dead(open_run(target, redis), LetterChoice()), id="retry"),
    ],
)
async def test_another_run_of_the_same_name_is_not_changed(change, connection, folder_of_another_run, capsys):
    folder = folder_of_another_run
    await some_work(connection)
    await compare_with_server(connection, RunIdentity(id="b" * 32))
    before = (await read_status(connection)).status_id
    with pytest.raises(RunMismatchError, match=r"bbbbbbbb.*aaaaaaaa: nothing was changed; name the server"):
        await anyio.to_thread.run_sync(partial(change, target=str(folder), redis=""))
    assert (await read_status(connection)).status_id == before
    await in_thread(str(folder), "", as_json=True)  # what only reads shows it
    assert json.loads(capsys.readouterr().out)["fed"] == 4
