"""The dashboard on a run with a server: waiting groups, dead letters, events; looking changes nothing."""

import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import asynccontextmanager

import aiohttp
import anyio
import msgspec
import pytest
from anyio.abc import TaskGroup

from stream.connection.run_identity import RunIdentity, compare_with_server, write_identity
from stream.operator.dead_letters import list_dead_letters
from stream.operator.status import read_status
from stream.queue.in_flight import CompletionInFlight, GroupInFlight
from tests.cases.pages import text_of
from tests.cases.records import dumped
from tests.cases.run_folders import write_run
from workers.dashboard.access import Access
from workers.dashboard.app import serve_dashboard
from workers.dashboard.live_view import LiveView, StatusReading
from workers.runs.catalog import Runs
from workers.runs.status import queue_report
from workers.settings.secrets import without_secrets


@pytest.fixture
def folder(tmp_path, run_name, redis_url):
    return write_run(tmp_path, run_name, redis=redis_url)


@asynccontextmanager
async def browser(folder, *, allow_changes=False):
    catalog = await anyio.to_thread.run_sync(Runs, [str(folder)])
    access = Access(token="t", allow_changes=True) if allow_changes else Access()
    async with serve_dashboard(catalog, access, 0) as url:
        base = f"{url}/runs/{folder.name}/"
        timeout = aiohttp.ClientTimeout(total=20)
        async with aiohttp.ClientSession(
            base, headers={"Origin": url, "Authorization": "Bearer t"}, timeout=timeout
        ) as session:
            yield session


async def dead_letter(pipe, name: str, error: str) -> None:
    await pipe.feed(name)
    stage = pipe.stage("prompts", "rollout-1", data_attempts=1)
    (lease,) = (await stage.claim(1)).leases
    assert await stage.release(lease, "data", error)


async def test_pages_show_what_queues_reports_for_the_same_status_and_change_nothing(pipe, folder):
    await pipe.scored("waits-for-trainer")
    await pipe.rolled_out("waits-for-rewards")
    await dead_letter(pipe, "dies", "<b>its image</b> does not decode\x1b[2J\u202e")
    before = await dumped(pipe.connection)
    async with browser(folder) as session:
        page = await text_of(session, f"/runs/{folder.name}")
        report = queue_report(pipe.connection.run, await read_status(pipe.connection, with_in_flight=True))
        assert f'<code id="status-id">{report.status_id}</code>' in page
        for name, stage in report.stages.items():
            assert f'data-figure="{name}-depth">{stage.depth}<' in page
            assert f'data-figure="{name}-claimed">{stage.claimed}<' in page
        for name in ("fed", "trained", "dropped", "outstanding"):
            assert f'data-figure="{name}">{getattr(report, name)}<' in page
        waiting = await text_of(session, "groups?at=trainer")
        assert "waits-for-trainer" in waiting
        assert "waits-for-rewards" not in waiting
        assert "waits-for-rewards" in await text_of(session, "groups?at=rewards")
        assert "server, waiting for rewards" in await text_of(session, "group?id=waits-for-rewards")
        dead = await text_of(session, "dead")
        assert r"&lt;b&gt;its image&lt;/b&gt; does not decode\x1b[2J\u202e" in dead
        assert "--allow-changes" in dead
        assert "<form" not in dead
        await text_of(session, "dead?after=1-(", 400)
        for path in ("in-flight", "workers", "engines", "timeline"):
            await text_of(session, path)
    assert await dumped(pipe.connection) == before


async def test_a_tool_that_hangs_is_on_the_page_with_its_name(pipe, folder):
    await pipe.feed("a")
    (lease,) = (await pipe.stage("prompts", "rollout-1").claim(1)).leases
    hanging = CompletionInFlight(
        index=0, turn=2, activity="tool", detail="ring<till>", since=1.0, engine="http://engine:8000", versions=[3, 4]
    )
    group = GroupInFlight(entry=lease.id, prompt="a", claimed_at=1.0, total=8, ended=7, completions=[hanging])
    key = pipe.connection.key("in_flight:prompts:rollout-1")
    await pipe.connection.redis.set(key, msgspec.json.encode([group]))
    async with browser(folder) as session:
        page = await text_of(session, "in-flight")
        assert "tool <code>ring&lt;till&gt;</code>" in page
        assert "a #0" in page
        assert "engine:8000" in page
        assert "7/8" in page
        assert "tool ring&lt;till&gt; 1" in await text_of(session, "workers")


async def test_dead_letters_are_retried_one_by_one_or_all_with_a_reason(pipe, folder):
    for number in range(5):
        await dead_letter(pipe, f"p{number}", "no image")
    async with browser(folder, allow_changes=True) as session:
        letter = (await list_dead_letters(pipe.connection))[0]
        page = await text_of(session, f"dead/letter?id={letter.id}")
        assert "no image" in page
        async with session.post("dead", data={"action": "retry", "id": letter.id}) as response:
            assert "retried 1 dead letter" in await response.text()
        assert (await read_status(pipe.connection)).dead == 4
        async with session.post("dead", data={"action": "retry", "reason": "infra"}) as response:
            assert "retried 0 dead letters" in await response.text()
        async with session.post("dead", data={"action": "retry", "reason": "data", "stage": "prompts"}) as response:
            assert "retried 4 dead letters" in await response.text()
        assert (await read_status(pipe.connection)).dead == 0
        async with session.post("dead", data={"action": "retry"}, headers={"Origin": "http://evil.example"}) as refused:
            assert refused.status == 403
        async with session.post("dead", data={"action": "burn"}) as refused:
            assert refused.status == 400
    assert (await pipe.prompt_counts())["outstanding"] == 5


@pytest.mark.usefixtures("identity_of_another_run")
async def test_dead_letters_of_another_run_of_the_same_name_are_not_changed(pipe, folder):
    await dead_letter(pipe, "p", "no image")
    await compare_with_server(pipe.connection, RunIdentity(id="b" * 32))
    async with (
        browser(folder, allow_changes=True) as session,
        session.post("dead", data={"action": "drop", "reason": "data"}) as response,
    ):
        assert response.status >= 400
    assert (await read_status(pipe.connection)).dead == 1


@pytest.fixture
def identity_of_another_run(folder):
    write_identity(folder, RunIdentity(id="a" * 32))


async def test_the_pages_are_renewed_while_they_are_open(pipe, folder):
    await pipe.feed("a")
    async with browser(folder) as session, session.get("events?parts=state,pipeline,nothing") as stream:
        assert stream.content_type == "text/event-stream"
        assert await _event(stream, "pipeline", 'data-figure="prompts-depth">1<')
        await pipe.feed("b", "c")
        assert await _event(stream, "pipeline", 'data-figure="prompts-depth">3<')


async def _event(stream, name: str, text: str) -> bool:
    """Read events until one of this name contains a text."""
    with anyio.fail_after(15):
        while True:
            event = (await stream.content.readuntil(b"\n\n")).decode()
            if event.startswith(f"event: {name}\n") and text in event:
                return True


class Counting:
    """A run that counts connections and renderings."""

    key, folder = "counting", None

    def __init__(self) -> None:
        self.connections = self.rendered = 0

    @asynccontextmanager
    async def connect(self, *, start_server):
        self.connections += 1
        yield None

    async def render(self, run, reading: StatusReading, connection) -> str:
        self.rendered += 1
        return f"frame {self.rendered}"


async def test_ten_viewers_share_one_reading_and_one_rendering(monkeypatch):
    reads = 0

    async def read(connection, **options):
        nonlocal reads
        reads += 1

    monkeypatch.setattr("workers.dashboard.live_view.read_status", read)
    monkeypatch.setattr("workers.dashboard.live_view._INTERVAL_S", 0.01)
    monkeypatch.setattr("workers.dashboard.live_view._RETRY_S", 0.01)
    run, seen = Counting(), []

    async def view(viewer: LiveView, tasks: TaskGroup) -> None:
        async for frame in viewer.frames(("part",)):
            seen.append((frame.number, frame.parts["part"]))
            if frame.number >= 5:
                return

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            shared = LiveView(run, tasks, {"part": run.render})
            async with anyio.create_task_group() as viewers:
                for _ in range(10):
                    viewers.start_soon(view, shared, tasks)
    assert shared.viewers == 0
    assert reads == run.rendered <= 7
    assert len(seen) >= 30
    assert len(set(seen)) <= 5


def test_a_dashboard_that_may_change_runs_makes_a_token_and_prints_it_in_its_address(folder):
    command = [sys.executable, "-m", "penstock", "dashboard", str(folder), "--allow-changes", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | without_secrets()) as process:
        url, _, token = process.stdout.readline().split()[-1].partition("/?token=")
        assert len(token) > 16
        form = {"Origin": url, "Content-Type": "application/x-www-form-urlencoded"}
        change = urllib.request.Request(f"{url}/runs/{folder.name}/dead", b"action=drop&reason=data", form)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(change, timeout=20)
        change.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(change, timeout=20) as answer:
            assert "dropped 0 dead letters" in answer.read().decode()
        process.terminate()
