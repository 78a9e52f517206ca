"""`penstock audit` finds every kind of damage to a run, and reports none in a running one."""

import json
import shutil

import anyio
import msgspec
import pytest
from redis import Redis

from stream.connection.run_connection import RunConnection, connect
from stream.errors import DataError, PenstockError
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters
from stream.private_server import private_server
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Dropped, LedgerOutcome, LedgerRecord, Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from workers.datasets.mix import fixed_rows, open_dataset_mix
from workers.runs.find import open_run
from workers.settings.toml_file import dump_settings, parse_settings
from workers.terminal.audit import show_audit

pytestmark = pytest.mark.usefixtures("silent_logs")

TRAINED = Trained()

TERMS = RetryPolicy(data_attempts=1)
KEYS = {
    "run", "fed", "trained", "dropped", "dead", "outstanding", "lost", "twice", "clean", "unsaved", "foreign_entries",
    "turns", "sandboxes", "notes",
}  # fmt: skip


class Small:
    """A run without a model: prompt file, ledger and checkpoint manifest, with a method for each step."""

    def __init__(self, folder, name, redis, rows: int = 8, extra: str = "") -> None:
        self.folder = folder / "run"
        self.folder.mkdir()
        self.file = folder / "prompts.jsonl"
        self.file.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(rows)) + extra)
        table = {"run": {"name": name, "folder": str(self.folder), "redis": redis}, "model": {"path": "m"}}
        self.settings = parse_settings(table | {"data": {"path": str(self.file)}, "rewards": [{"ref": "a:b"}]})
        (self.folder / "run.toml").write_text(dump_settings(self.settings))
        self.mixture = open_dataset_mix(self.settings)
        self.fingerprint = self.mixture.fingerprint()
        self.ledger = Ledger(self.folder / "ledger.jsonl")
        self.marked: list[str] = []

    async def begin(self, connection, pipe_type) -> None:
        self.connection, self.pipe = connection, pipe_type(connection)
        self.trainer_lease = await TrainerLease.acquire(connection, 30.0)
        await self.trainer_lease.recover(self.ledger)
        self.stages = {name: Stage(connection, name, f"w-{name}", TERMS) for name in ("prompts", "groups", "scored")}
        await connection.write_hash("meta", {"data": self.fingerprint})

    async def feed(self, start: int, stop: int) -> None:
        prompts, _ = await anyio.to_thread.run_sync(self.mixture.read_prompts, start, stop)
        await Feed(self.connection, 1000).put(prompts, str(start or ""), str(stop))

    async def claim(self, stage: str, count: int):
        return (await self.stages[stage].claim(count)).leases

    async def pass_on(self, stage: str, into: str, count: int) -> None:
        for lease in await self.claim(stage, count):
            await self.stages[stage].complete(lease, into, self.pipe.group(lease.prompt_id))

    async def train(self, count: int, outcome: LedgerOutcome = TRAINED) -> None:
        leases = await self.claim("scored", count)
        lines = [LedgerRecord(lease.prompt_id, outcome, 1, 0, "abc") for lease in leases]
        await anyio.to_thread.run_sync(self.ledger.append, lines)
        await self.trainer_lease.commit(self.stages["scored"], [EndedGroup(lease, outcome) for lease in leases], 1)
        self.marked += [lease.id for lease in leases]

    async def keep(self) -> None:
        await anyio.to_thread.run_sync(self._save)
        await self.trainer_lease.acknowledge(self.marked)
        self.marked.clear()

    def _save(self) -> None:
        folder = self.folder / "checkpoints" / "step-000001"
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {"progress": {"step": 1, "ledger_bytes": self.ledger.sync()}}
        (folder / "checkpoint.json.tmp").write_bytes(msgspec.json.encode(manifest))
        (folder / "checkpoint.json.tmp").rename(folder / "checkpoint.json")


async def made(*arguments) -> Small:
    return await anyio.to_thread.run_sync(Small, *arguments)


@pytest.fixture
async def small(tmp_path, connection, redis_url, pipe_on):
    """Eight prompts: two trained and one dropped, in a checkpoint, one trained since, one to be scored, one dead."""
    result = await made(tmp_path, connection.run, redis_url)
    await result.begin(connection, pipe_on)
    await result.feed(0, 8)
    await result.pass_on("prompts", "groups", 5)
    await result.pass_on("groups", "scored", 4)
    await result.train(2)
    await result.train(1, Dropped("stale"))
    await result.keep()
    await result.train(1)
    (dying,) = await result.claim("prompts", 1)
    await result.stages["prompts"].release(dying, "data", "its image does not decode")
    yield result
    result.ledger.close()


@pytest.fixture
def audited(capsys):
    async def run(small: Small) -> dict:
        """Return the audit's report. The command runs an event loop, so it runs in a thread."""
        is_clean = await anyio.to_thread.run_sync(lambda: show_audit(open_run(small.folder), as_json=True))
        (line,) = capsys.readouterr().out.splitlines()
        report = json.loads(line)
        assert is_clean == report["clean"]
        parts = sum(map(len, (report["lost"], report["twice"]))) + report["trained"] + report["dead"]
        assert report["fed"] == parts + sum(report["dropped"].values()) + sum(report["outstanding"].values())
        return report

    return run


def whose(findings: list[dict]) -> list[str]:
    return [each["prompt"] for each in findings]


async def ids_in(connection, stage: str) -> list[tuple[bytes, str]]:
    return [(id_, fields[b"prompt"].decode()) for id_, fields in await connection.redis.xrange(connection.key(stage))]


def rewrite(small: Small, change) -> None:
    lines = [json.loads(text) for text in small.ledger.path.read_text().splitlines()]
    change(lines)
    small.ledger.path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


async def test_the_audit_says_where_every_prompt_is(small, audited):
    report = await audited(small)
    assert set(report) == KEYS
    assert (report["fed"], report["trained"], report["dropped"], report["dead"]) == (8, 3, {"stale": 1}, 1)
    assert report["outstanding"] == {"prompts": 2, "groups": 1}
    assert (report["clean"], report["unsaved"], report["foreign_entries"], report["notes"]) == (True, 1, 0, [])


async def test_reading_creates_and_changes_no_key(small, audited, redis_url):
    with Redis.from_url(redis_url) as redis:
        before = {key: redis.dump(key) for key in redis.keys("*")}
        files = {path: path.read_bytes() for path in small.folder.rglob("*") if path.is_file()}
        await audited(small)
        assert {key: redis.dump(key) for key in redis.keys("*")} == before
    assert {path: path.read_bytes() for path in small.folder.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize("stage", ["prompts", "groups", "scored"])
async def test_a_deleted_stream_entry_is_a_lost_prompt(small, audited, stage):
    id_, prompt = (await ids_in(small.connection, stage))[-1]
    await small.connection.redis.xdel(small.connection.key(stage), id_)
    report = await audited(small)
    assert (whose(report["lost"]), report["twice"]) == ([prompt], [])


async def test_a_prompt_without_any_trace_is_lost(small, audited):
    ((id_, prompt),) = await ids_in(small.connection, "groups")
    await small.connection.redis.xdel(small.connection.key("groups"), id_)
    await small.connection.redis.hdel(small.connection.key("unfinished"), prompt)
    assert whose((await audited(small))["lost"]) == [prompt]


async def test_a_ledger_line_with_another_prompt_loses_one_and_counts_one_twice(small, audited):
    renamed = []

    def change(lines):
        renamed.extend([lines[0]["prompt"], lines[1]["prompt"]])
        lines[0]["prompt"] = lines[1]["prompt"]

    rewrite(small, change)
    report = await audited(small)
    assert whose(report["lost"]) == renamed[:1]
    assert whose(report["twice"]) == renamed[1:]


async def test_an_unreadable_ledger_line_is_reported_and_its_prompt_is_lost(small, audited):
    content = small.ledger.path.read_bytes()
    first = json.loads(content.splitlines()[0])["prompt"]
    small.ledger.path.write_bytes(b"#" + content[1:])
    report = await audited(small)
    assert whose(report["lost"]) == [first]
    assert "ledger.jsonl, line 1" in report["notes"][0]


async def test_a_ledger_line_of_a_dead_prompt_counts_it_twice(small, audited):
    (letter,) = await list_dead_letters(small.connection)
    await anyio.to_thread.run_sync(small.ledger.append, [LedgerRecord(letter.prompt_id, Trained(), 2, 1, "abc")])
    report = await audited(small)
    assert whose(report["twice"]) == [letter.prompt_id]
    assert any("its image does not decode" in fact for fact in report["twice"][0]["evidence"])


async def test_groups_that_only_a_missing_checkpoint_held_are_lost(small, audited):
    manifest = small.folder / "checkpoints" / "step-000001" / "checkpoint.json"
    manifest.write_text("{")
    report = await audited(small)
    assert len(report["lost"]) == 3
    assert "which no checkpoint holds" in report["lost"][0]["evidence"][0]


async def test_dead_letters_dropped_by_the_operator_count_as_dropped(small, audited):
    (letter,) = await list_dead_letters(small.connection)
    await drop_dead_letters(small.connection, [letter.id])
    report = await audited(small)
    assert (report["dead"], report["dropped"], report["clean"]) == (0, {"stale": 1, "operator": 1}, True)


async def test_foreign_entries_are_not_prompts(small, audited):
    await small.connection.redis.xadd(small.connection.key("groups"), {"payload": b"\xff\x00"})
    await small.connection.redis.xadd(small.connection.key("scored"), {"prompt": b"\xff", "payload": b""})
    report = await audited(small)
    assert (report["fed"], report["foreign_entries"], report["clean"]) == (8, 2, True)


async def test_rows_that_could_not_be_fed_are_not_lost(tmp_path, connection, redis_url, pipe_on, audited):
    small = await made(tmp_path, connection.run, redis_url, 8, '{"prompt": \n[1]\n{"prompt": 7}\n')
    await small.begin(connection, pipe_on)
    await small.feed(0, 11)
    report = await audited(small)
    assert (report["fed"], report["outstanding"], report["clean"]) == (8, {"prompts": 8}, True)
    small.ledger.close()


async def test_a_changed_prompt_file_is_reported_if_prompts_are_lost(small, audited):
    small.file.write_text(small.file.read_text() + '{"prompt": "One more."}\n')
    id_, _ = (await ids_in(small.connection, "groups"))[0]
    await small.connection.redis.xdel(small.connection.key("groups"), id_)
    assert "has changed since the run read it" in (await audited(small))["notes"][-1]


async def test_a_prompt_file_that_was_only_written_anew_is_not_reported_as_changed(small, audited):
    known = await anyio.to_thread.run_sync(fixed_rows, small.settings, {})
    await small.connection.write_hash("identity", known)
    small.file.write_text(small.file.read_text().rstrip("\n"))
    id_, _ = (await ids_in(small.connection, "groups"))[0]
    await small.connection.redis.xdel(small.connection.key("groups"), id_)
    report = await audited(small)
    assert report["lost"]
    assert not any("has changed" in note for note in report["notes"])


async def test_a_missing_prompt_file_is_a_clear_error(small, audited):
    small.file.unlink()
    with pytest.raises(DataError, match=r"prompts.jsonl: no such file"):
        await audited(small)


async def test_prompts_of_a_custom_feeder_are_audited_by_their_traces(
    tmp_path, connection, redis_url, pipe_on, audited
):
    small = await made(tmp_path, connection.run, redis_url)
    await small.begin(connection, pipe_on)
    await small.pipe.scored("x", "y", "z")
    await small.train(1)
    report = await audited(small)
    assert (report["fed"], report["trained"], report["outstanding"]) == (3, 1, {"scored": 2})
    assert "a custom feeder" in report["notes"][-1]
    id_, prompt = (await ids_in(connection, "scored"))[-1]
    await connection.redis.xdel(connection.key("scored"), id_)
    assert whose((await audited(small))["lost"]) == [prompt]
    small.ledger.close()


async def test_after_the_server_was_emptied_files_are_audited(small, audited):
    for key in await small.connection.redis.keys(f"{{{small.connection.run}}}:*"):
        await small.connection.redis.delete(key)
    report = await audited(small)
    assert (report["fed"], report["trained"], report["dropped"]) == (4, 2, {"stale": 1})
    assert report["outstanding"] == {"again": 1}
    assert report["clean"]
    assert "the server was not audited: the server has no run named" in report["notes"][0]
    assert "4 of 8 rows" in report["notes"][1]


async def test_a_repeated_ledger_line_is_found_without_a_server(small, audited, tmp_path):
    rewrite(small, lambda lines: lines.append(lines[0]))
    settings = msgspec.structs.replace(small.settings.run, redis="redis://127.0.0.1:1")
    refused = msgspec.structs.replace(small.settings, run=settings)
    (small.folder / "run.toml").write_text(dump_settings(refused))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.runs.run._RECONNECT_S", 0.2)
        report = await audited(small)
    assert "127.0.0.1:1 did not answer" in report["notes"][0]
    assert len(report["twice"]) == 1


async def test_a_stopped_run_is_audited_from_its_server_data_or_its_files(tmp_path, pipe_on, audited):
    small = await made(tmp_path, "rests", "")
    async with private_server(small.folder / "redis") as url, connect(url, "rests") as connection:
        await small.begin(connection, pipe_on)
        await small.feed(0, 8)
        await small.pass_on("prompts", "groups", 3)
        await small.pass_on("groups", "scored", 3)
        await small.train(2)
        await small.keep()
    report = await audited(small)
    assert (report["fed"], report["trained"], report["outstanding"]) == (8, 2, {"prompts": 5, "scored": 1})
    await anyio.to_thread.run_sync(shutil.rmtree, small.folder / "redis")
    report = await audited(small)
    assert (report["fed"], report["trained"], report["clean"]) == (2, 2, True)
    assert not (small.folder / "redis").exists()
    small.ledger.close()


async def test_a_run_that_has_not_started_is_an_error(tmp_path, audited):
    small = await made(tmp_path, "new", "")
    small.ledger.close()
    await anyio.to_thread.run_sync(small.ledger.path.unlink)
    with pytest.raises(PenstockError, match="has not begun"):
        await audited(small)


def test_an_audit_needs_the_runs_files(redis_url):
    with pytest.raises(PenstockError, match="give its folder"):
        show_audit(open_run("somebody", redis_url))


async def test_the_report_has_a_table_evidence_and_a_verdict(small, capsys):
    await anyio.to_thread.run_sync(lambda: show_audit(open_run(small.folder)))
    output = capsys.readouterr().out
    assert output.splitlines()[0] == f"{small.connection.run}   8 prompts fed"
    assert "dropped: stale" in output
    assert output.splitlines()[-1] == "clean: no prompt is lost or counted twice"
    ids = [id_ for stage in ("prompts", "groups") for id_, _ in await ids_in(small.connection, stage)]
    for stage in ("prompts", "groups"):
        await small.connection.redis.xdel(small.connection.key(stage), *ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.terminal.audit._MAX_FINDINGS_SHOWN", 1)
        assert not await anyio.to_thread.run_sync(lambda: show_audit(open_run(small.folder)))
        output = capsys.readouterr().out
        await anyio.to_thread.run_sync(lambda: show_audit(open_run(small.folder), show_all=True))
        every = capsys.readouterr().out
    assert output.count("unfinished on the server, which has no entry of it") == 1
    assert "and 2 more lost; --all shows all" in output
    assert every.count("unfinished on the server, which has no entry of it") == 3
    assert output.splitlines()[-1] == "not clean: 3 lost, 0 counted twice"


async def test_a_running_run_is_always_clean(tmp_path, connection, redis_url, pipe_on, audited, monkeypatch):
    """Prompts move through every stage, and die, while an audit reads the stages slowly."""
    script = RunConnection.run_script

    async def dawdling(self, name, *arguments):
        if name == "scan_entries":
            await anyio.sleep(0.01)
        return await script(self, name, *arguments)

    monkeypatch.setattr(RunConnection, "run_script", dawdling)
    monkeypatch.setattr("workers.runs.audit._MAX_AUDITS", 1)
    small = await made(tmp_path, connection.run, redis_url, 30_000)
    await small.begin(connection, pipe_on)
    moved, enough = 0, anyio.Event()

    async def move() -> None:
        nonlocal moved
        await small.feed(0, 30)
        while not enough.is_set():
            await small.feed(30 * (moved + 1), 30 * (moved + 2))  # one batch ahead
            await small.pass_on("prompts", "groups", 28)
            for lease in await small.claim("prompts", 2):
                await small.stages["prompts"].release(lease, "data", "no")
            await small.pass_on("groups", "scored", 28)
            await small.train(14)
            await small.train(14, Dropped("stale"))
            await small.keep()
            moved += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(move)
        with anyio.fail_after(50):
            for _ in range(6):
                report = await audited(small)
                assert report["clean"], report
        enough.set()
    assert moved
    report = await audited(small)
    assert (report["trained"], report["dropped"], report["dead"]) == (14 * moved, {"stale": 14 * moved}, 2 * moved)
    assert (report["fed"], report["outstanding"]) == (30 * (moved + 1), {"prompts": 30})
    small.ledger.close()
