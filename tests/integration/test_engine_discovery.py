"""Engine discovery: DNS names, files of URLs, and `penstock engines`."""

import json
import socket
from contextlib import asynccontextmanager

import anyio
import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from tests.scripted_engine.engine import ScriptedEngine
from workers.cli import penstock
from workers.engine_api.discovery import EngineDiscovery


@pytest.fixture(autouse=True)
def frequent_lookups(monkeypatch):
    monkeypatch.setattr("workers.engine_api.discovery._LOOKUP_INTERVAL_S", 0.02)


@asynccontextmanager
async def watched(*entries):
    discovery = await EngineDiscovery.look_up(entries)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(discovery.watch)
        yield discovery
        tasks.cancel_scope.cancel()


async def becomes(discovery: EngineDiscovery, *urls: str) -> None:
    with anyio.fail_after(2):
        while discovery.urls != urls:
            await discovery.changed.wait()


async def test_engines_are_added_and_removed_by_editing_a_file(tmp_path):
    file = anyio.Path(tmp_path / "engines.txt")
    await file.write_text("# the second rack\nhttp://b:1/   # new\n\nhttp://a:1\n", encoding="utf-8")
    async with watched("http://a:1", f"file:{file}") as discovery:
        assert discovery.urls == ("http://a:1", "http://b:1")
        await file.write_text("http://c:1\n")
        await becomes(discovery, "http://a:1", "http://c:1")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "engines.txt: No such file or directory"),
        (b"", "engines.txt has no URL"),
        (b"# none\n", "engines.txt has no URL"),
        (b"http://b:1\nb:1\n", "engines.txt:2: 'b:1' is not the URL of an engine"),
        (b"\xff", "can't decode byte"),
    ],
)
async def test_an_unreadable_file_keeps_the_last_engines_and_is_logged_once(tmp_path, content, why):
    file = anyio.Path(tmp_path / "engines.txt")
    await file.write_text("http://a:1\n")
    with capture_logs() as lines:
        async with watched(f"file:{file}") as discovery:
            if content is None:
                await file.unlink()
            else:
                await file.write_bytes(content)
            await anyio.sleep(0.3)
            assert discovery.urls == ("http://a:1",)
            await file.write_text("http://c:1\n")
            await becomes(discovery, "http://c:1")
    (failed,) = [line for line in lines if line["event"] == "engines.lookup_failed"]
    assert why in failed["why"]
    assert failed["known"] == 1
    assert [line["event"] for line in lines].count("engines.lookup_recovered") == 1


async def test_a_run_starts_before_its_file_exists(tmp_path):
    file = anyio.Path(tmp_path / "engines.txt")
    async with watched(f"file:{file}") as discovery:
        assert discovery.urls == ()
        assert f"file:{file} (engine.urls) has none" in discovery.empty_reason
        await file.write_text("http://a:1\n")
        await becomes(discovery, "http://a:1")
    assert "engine.urls is empty" in EngineDiscovery(()).empty_reason


async def test_a_dns_failure_keeps_the_known_engines_and_is_logged_once(monkeypatch):
    answers = {"now": ["10.0.0.1", "10.0.0.2"]}

    async def getaddrinfo(host, port, **_):
        if answers["now"] is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in answers["now"]]

    monkeypatch.setattr("anyio.getaddrinfo", getaddrinfo)
    with capture_logs() as lines:
        async with watched("dns+http://engines:8000") as discovery:
            assert discovery.urls == ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
            answers["now"] = None
            await anyio.sleep(0.3)
            assert len(discovery.urls) == 2
            answers["now"] = ["10.0.0.2", "10.0.0.3"]
            await becomes(discovery, "http://10.0.0.2:8000", "http://10.0.0.3:8000")
    events = [line["event"] for line in lines]
    assert events.count("engines.lookup_failed") == events.count("engines.lookup_recovered") == 1


# The command


@pytest.fixture
def listed(tmp_path):
    """List the engines of a settings file with these `engine.urls`."""

    async def list_engines(*urls, json_=True):
        text = 'run.name = "looked-at"\nmodel.path = "m"\ndata.path = "d"\nrewards = [{ref = "r:f"}]\n'
        file = anyio.Path(tmp_path / "run.toml")
        await file.write_text(text + f"engine.urls = {json.dumps(urls)}\n")
        words = ["engines", str(file), *(["--json"] if json_ else [])]
        result = await anyio.to_thread.run_sync(CliRunner().invoke, penstock, words)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout) if json_ else " ".join(result.stdout.split())

    return list_engines


async def test_the_command_lists_source_health_and_version_of_each_engine(listed, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("urllib.request._opener", None)  # cached proxy settings of an earlier call
    file = anyio.Path(tmp_path / "engines.txt")
    async with ScriptedEngine(lambda *_: [1], version="7") as engine:
        await file.write_text(f"{engine.url}/\n")
        silent, healthy = await listed("http://127.0.0.1:9/", f"file:{file}")
    assert (silent["url"], silent["source"], silent["healthy"]) == ("http://127.0.0.1:9", "settings", False)
    assert silent["error"]
    assert healthy == {
        "url": engine.url,
        "source": "file",
        "healthy": True,
        "error": "",
        "policy_version": 7,
        "cache_bytes": None,
        "max_cache_bytes": None,
    }


async def test_a_name_or_file_that_cannot_be_looked_up_is_listed_with_the_other_engines(listed, tmp_path):
    entries = ("http://127.0.0.1:9", "dns+http://no.such.host.invalid:8000", f"file:{tmp_path}/none.txt")
    reports = await listed(*entries)
    assert [(report["url"], report["source"]) for report in reports] == list(
        zip(entries, ("settings", "dns", "file"), strict=True)
    )
    for report in reports[1:]:
        assert report["error"].startswith("cannot be looked up here: ")
    assert "none.txt: No such file" in reports[2]["error"]
    assert "cannot be looked up here" in await listed(*entries, json_=False)
    assert "engine.urls is empty" in await listed(json_=False)
