"""`penstock sandboxes` and `penstock audit` on a run with sandboxes; a place's own list, without a server."""

import json
import time
from types import SimpleNamespace

import anyio
import pytest
from click.testing import CliRunner

from envs.sandboxes.contract import BEGUN_LABEL, RUN_LABEL, SandboxSpec
from stream.operator.control import release_worker
from stream.operator.sandboxes import ListedPlace, account_for_sandboxes, scan_sandboxes
from stream.queue.sandboxes import SandboxCounts, SandboxPlace, SandboxRecord, sandbox_run_id
from tests.cases.pages import browser, text_of
from tests.cases.sandbox_place import reached, serve_place
from workers.cli import penstock
from workers.runs.find import open_run
from workers.settings.toml_file import dump_settings, parse_settings

pytestmark = pytest.mark.usefixtures("silent_logs")

PROVIDER = "tests.cases.sandbox_place:PlaceProvider"
SPEC = SandboxSpec(memory_mb=64, disk_mb=64)
CREATE_S = 0.5


@pytest.fixture
async def run(pipe, redis_url, run_name, tmp_path):
    """A run in whose place lives one sandbox, which a lease owns."""
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Say it."}\n')
    with serve_place(tmp_path) as path:
        table = {
            "run": {"name": run_name, "folder": str(folder), "redis": redis_url},
            "model": {"path": "m"},
            "data": {"path": str(tmp_path / "prompts.jsonl")},
            "rewards": [{"ref": "a:b"}],
            "sandboxes": {
                "provider": PROVIDER,
                "address": str(path),
                "create_timeout_s": CREATE_S,
                "call_timeout_s": 2.0,
                "grace_s": 0.0,
            },
        }
        (folder / "run.toml").write_text(dump_settings(parse_settings(table)))
        await pipe.feed("prompts:0:0")
        worker = pipe.stage("prompts", "rollout-host-77-x")
        (lease,) = (await worker.claim(1)).leases
        records = SandboxPlace(pipe.connection, "place.sock", PROVIDER)
        async with reached(path) as place:
            made = SimpleNamespace(
                folder=folder,
                path=path,
                connection=pipe.connection,
                records=records,
                place=place,
                worker=worker,
                lease=lease,
            )
            await create(made, "s-1")
            yield made


async def create(run, name):
    record = SandboxRecord(stage="prompts", entry=run.lease.id, prompt="prompts:0:0", index=2, purpose="agent")
    begun = await run.records.begin(run.worker, run.lease, name, record, 60)
    labels = {RUN_LABEL: await sandbox_run_id(run.connection), BEGUN_LABEL: str(begun)}
    await run.place.create(name, SPEC, labels)


async def command(*arguments):
    """Run a command of the terminal; returns exit code and output."""
    result = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(penstock, [*map(str, arguments)]))
    if result.exception and not isinstance(result.exception, SystemExit):
        return 1, f"{result.output}{result.exception}"
    return result.exit_code, result.output


async def kill_worker(run):
    await release_worker(run.connection, "host", 77, 5, "was killed")


async def test_a_table_says_whose_each_sandbox_is(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, shown = await command("sandboxes", run.folder)
    assert code == 0
    for text in (
        "s-1",
        "prompts:0:0",
        "agent",
        "s left",
        "rollout-host-77-x",
        "begun 1 = stopped 0 + reaped 0 + stray 0 + live 1",
    ):
        assert text in shown
    await kill_worker(run)
    assert "lost" in (await command("sandboxes", run.folder))[1]
    (sandbox,) = json.loads((await command("sandboxes", run.folder, "--json"))[1])["live"]
    assert (sandbox["name"], sandbox["completion"], sandbox["state"]) == ("s-1", 2, "lost")
    assert sandbox["lease_s"] < 0


async def test_reaping_removes_what_is_lost_and_leaves_what_is_owned(run):
    assert (await command("sandboxes", run.folder, "--reap"))[0] == 0
    assert len(await run.place.list()) == 1
    await kill_worker(run)
    _, shown = await command("sandboxes", run.folder, "--reap")
    assert "begun 1 = stopped 0 + reaped 1 + stray 0 + live 0" in shown
    assert await run.place.list() == []


async def test_a_worker_that_looks_after_the_place_is_left_to_it(run):
    assert (await run.records.find_due("a worker", 0, 30, 30)).is_active
    code, shown = await command("sandboxes", run.folder, "--reap")
    assert code != 0
    assert "a rollout worker of the run looks after place.sock" in shown


async def test_a_place_is_listed_and_emptied_without_a_server(run):
    labels = {RUN_LABEL: "a lost run", BEGUN_LABEL: str(time.time() - 7200)}
    await run.place.create("old", SPEC, labels)
    of_place = ("sandboxes", "--place", PROVIDER, "--address", run.path, "--all-runs")
    _, shown = await command(*of_place)
    assert "old" in shown
    assert "s-1" in shown
    _, shown = await command(*of_place, "--older-than", 3600, "--reap", "--json")
    answer = json.loads(shown)
    assert ([each["name"] for each in answer["sandboxes"]], answer["removed"], answer["problems"]) == (
        ["old"],
        True,
        {},
    )
    assert [listed.name for listed in await run.place.list()] == ["s-1"]


async def test_a_place_is_only_asked_for_all_runs(run):
    code, shown = await command("sandboxes", "--place", PROVIDER)
    assert (code, "go together" in shown) == (2, True)


async def audited(run):
    return await anyio.to_thread.run_sync(lambda: open_run(run.folder).audit())


async def test_an_audit_accounts_for_every_sandbox(run):
    account = (await audited(run)).sandboxes
    assert str(account) == "sandboxes: begun 1 = stopped 0 + reaped 0 + stray 0 + live 1"
    assert (account.findings, account.notes) == ([], [])
    code, shown = await command("audit", run.folder)
    assert (code, str(account) in shown) == (0, True)


async def test_an_audit_finds_a_sandbox_that_nobody_counts(run):
    await run.connection.redis.hdel(run.connection.key("sandboxes:place.sock"), "s-1")
    report = await audited(run)
    assert report.sandboxes.findings == ["1 of 1 sandboxes are neither ended nor live"]
    assert not report.clean
    code, shown = await command("audit", run.folder)
    assert code == 1
    assert "1 finding about sandboxes" in shown


async def test_an_audit_names_a_place_that_it_does_not_reach(run):
    run.path.unlink()
    account = (await audited(run)).sandboxes
    assert account.findings == []
    assert "place.sock were not compared: unreachable" in account.notes[0]


async def test_a_finished_run_has_no_sandbox(run):
    await run.connection.write_hash("meta", {"finished": "enough"})
    assert (await audited(run)).sandboxes.findings == ["the run has finished and has sandboxes: s-1"]


@pytest.mark.parametrize(("lost_s", "is_found"), [(59.0, False), (61.0, True)])
async def test_what_is_lost_for_a_minute_is_a_finding(run, lost_s, is_found):
    await kill_worker(run)
    scan = await scan_sandboxes(run.connection)
    (lost,) = scan.live
    assert (lost.state, -lost.lease_s < 5) == ("lost", True)
    from msgspec.structs import replace

    old = replace(scan, live=[replace(lost, lease_s=-lost_s, age_s=500.0)])
    findings = account_for_sandboxes(old, {"place.sock": ListedPlace(begun={"s-1": 0.0})}, 1.0).findings
    assert bool(findings) is is_found


async def test_a_place_must_have_what_the_server_knows(run):
    scan = await scan_sandboxes(run.connection)
    listed = {"place.sock": ListedPlace(begun={"s-1": scan.now, "stray": scan.now - 100, "new": scan.now - 1})}
    assert account_for_sandboxes(scan, listed, 10.0).findings == [
        "place.sock has sandboxes of the run without a record: stray"
    ]
    assert account_for_sandboxes(scan, {"place.sock": ListedPlace(begun={})}, 0.0).notes == [
        "place.sock does not have s-1; their episodes find out"
    ]
    assert scan.counts == SandboxCounts(begun=1)


async def test_the_page_shows_sandboxes_beside_their_completions(run):
    async with browser(run.folder) as session:
        page = await text_of(session, "/runs/run/sandboxes")
    for text in ("prompts:0:0 #2", "<code>s-1</code>", "agent", "left", "rollout-host-77-x", "begun</span> 1"):
        assert text in page
