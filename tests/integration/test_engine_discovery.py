"""Engine discovery: the operator's overrides, DNS, and `penstock engines`."""

import json
import socket
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from stream.errors import PenstockError
from stream.operator.engine_overrides import add_engine, read_engine_overrides, remove_engine
from tests.scripted_engine.engine import ScriptedEngine
from workers.cli import penstock
from workers.engine_api.discovery.discovery import EngineDiscovery
from workers.settings.engine import Engine

ANN = "ann@box"


@asynccontextmanager
async def watched(connection, **engine):
    discovery = await EngineDiscovery.from_settings(Engine(**engine), connection)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(discovery.watch)
        yield discovery
        tasks.cancel_scope.cancel()


async def becomes(discovery: EngineDiscovery, *urls: str) -> None:
    with anyio.fail_after(2):
        while discovery.urls != urls:
            await discovery.changed.wait()


async def test_a_worker_learns_immediately_of_engines_added_and_removed(connection):
    async with watched(connection, urls=("http://a:1",)) as discovery:
        assert await add_engine(connection, "http://b:1", ANN)
        await becomes(discovery, "http://a:1", "http://b:1")
        assert await remove_engine(connection, "http://b:1", ANN)
        await becomes(discovery, "http://a:1")
        assert await add_engine(connection, "http://b:1", ANN)
        await becomes(discovery, "http://a:1", "http://b:1")


async def test_a_removed_engine_of_the_settings_stays_removed_for_later_workers(connection):
    urls = ("http://a:1", "http://b:1")
    async with watched(connection, urls=urls) as discovery:
        await remove_engine(connection, "http://a:1", ANN)
        await becomes(discovery, "http://b:1")
    assert (await EngineDiscovery.from_settings(Engine(urls=urls), connection)).urls == ("http://b:1",)
    await add_engine(connection, "http://a:1", ANN)
    assert (await EngineDiscovery.from_settings(Engine(urls=urls), connection)).urls == urls


async def test_repeating_an_override_changes_nothing(connection):
    assert await add_engine(connection, "http://b:1", ANN)
    assert not await add_engine(connection, "http://b:1", "bob@box")
    assert [(word.url, word.set_by) for word in await read_engine_overrides(connection)] == [("http://b:1", ANN)]


async def test_a_full_list_drops_the_oldest_removals_but_no_added_engine(connection, monkeypatch):
    monkeypatch.setattr("stream.operator.engine_overrides.MAX_ENGINES", 4)
    for name in ("a", "b", "c", "d"):
        await (remove_engine if name in "ac" else add_engine)(connection, name, ANN)
    await add_engine(connection, "e", ANN)
    assert [word.url for word in await read_engine_overrides(connection)] == ["b", "c", "d", "e"]
    await add_engine(connection, "f", ANN)
    with pytest.raises(PenstockError, match="4 engines on its list"):
        await add_engine(connection, "g", ANN)
    assert await remove_engine(connection, "b", ANN)
    assert [word.url for word in await read_engine_overrides(connection)] == ["d", "e", "f", "b"]


async def test_an_unknown_run_has_no_overrides(redis_url):
    from stream.connection.run_connection import connect

    async with connect(redis_url, "no-such-run", create=False) as connection:
        with pytest.raises(PenstockError, match="has no run named 'no-such-run'"):
            await add_engine(connection, "http://a:1", ANN)
        assert await read_engine_overrides(connection) == []


async def test_a_dns_failure_keeps_the_known_engines_and_is_logged_once(connection, monkeypatch):
    monkeypatch.setattr("workers.engine_api.discovery.discovery._DNS_INTERVAL_S", 0.02)
    answers = {"now": ["10.0.0.1", "10.0.0.2"]}

    async def getaddrinfo(host, port, **_):
        if answers["now"] is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in answers["now"]]

    monkeypatch.setattr("anyio.getaddrinfo", getaddrinfo)
    with capture_logs() as lines:
        async with watched(connection, urls=("dns+http://engines:8000",)) as discovery:
            assert discovery.urls == ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
            answers["now"] = None
            await anyio.sleep(0.3)
            assert len(discovery.urls) == 2
            answers["now"] = ["10.0.0.2", "10.0.0.3"]
            await becomes(discovery, "http://10.0.0.2:8000", "http://10.0.0.3:8000")
    events = [line["event"] for line in lines]
    assert events.count("engines.dns_failed") == events.count("engines.dns_recovered") == 1


# The command


def invoke(*words: str) -> dict:
    result = CliRunner().invoke(penstock, ["engines", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def file(tmp_path, redis_url, run_name):
    text = f'run.name = "{run_name}"\nrun.redis = "{redis_url}"\nmodel.path = "m"\ndata.path = "d"\n'
    text += 'rewards = [{ref = "r:f"}]\nengine.urls = ["http://127.0.0.1:9/"]\n'
    (tmp_path / "run.toml").write_text(text)
    return str(tmp_path / "run.toml")


async def test_the_command_lists_source_health_and_version_of_each_engine(connection, file):
    async with ScriptedEngine(lambda *_: [1], version="7") as engine:
        added = await anyio.to_thread.run_sync(lambda: invoke("add", f"{engine.url}/", file))
        assert (added["url"], added["changed"], added["healthy"]) == (engine.url, True, True)
        named, listed = await anyio.to_thread.run_sync(lambda: invoke("list", file))
    assert (named["url"], named["source"], named["healthy"], named["removed"]) == (
        *("http://127.0.0.1:9", "settings", False, False),
    )
    assert named["error"]
    assert (listed["url"], listed["source"], listed["healthy"], listed["policy_version"]) == (
        engine.url,
        "operator",
        True,
        7,
    )


async def test_the_command_ignores_the_proxy_of_the_environment(connection, file, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("urllib.request._opener", None)  # cached proxy settings of an earlier call
    async with ScriptedEngine(lambda *_: [1], version="7") as engine:
        added = await anyio.to_thread.run_sync(lambda: invoke("add", engine.url, file))
    assert added["healthy"], added


async def test_a_name_that_does_not_resolve_is_listed_with_the_other_engines(connection, file):
    settings = anyio.Path(file)
    text = await settings.read_text()
    name = '"dns+http://no.such.host.invalid:8000"'
    await settings.write_text(text.replace('"http://127.0.0.1:9/"', f'"http://127.0.0.1:9/", {name}'))
    await anyio.to_thread.run_sync(lambda: invoke("add", "http://127.0.0.1:8", file))
    named, listed, at_name = await anyio.to_thread.run_sync(lambda: invoke("list", file))
    assert (named["url"], listed["url"]) == ("http://127.0.0.1:9", "http://127.0.0.1:8")
    assert (at_name["url"], at_name["source"], at_name["healthy"]) == (
        *("http://no.such.host.invalid:8000", "dns", False),
    )
    assert at_name["error"].startswith("the name does not resolve here: ")
    plain = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(penstock, ["engines", "list", file]))
    assert "the name does not resolve here" in " ".join(plain.stdout.split())
    for port in (9, 8):
        removed = await anyio.to_thread.run_sync(partial(invoke, "remove", f"http://127.0.0.1:{port}", file))
    assert removed["none_left"] is False, "the DNS name may still have engines"


async def test_an_engine_that_does_not_answer_may_be_added_with_a_note(connection, file):
    added = await anyio.to_thread.run_sync(lambda: invoke("add", "http://127.0.0.1:9/x", file))
    assert (added["changed"], added["healthy"]) == (True, False)
    plain = await anyio.to_thread.run_sync(
        lambda: CliRunner().invoke(penstock, ["engines", "add", "http://127.0.0.1:8/", file])
    )
    assert "it does not answer from here" in plain.stdout
    assert [word.url for word in await read_engine_overrides(connection)] == [
        "http://127.0.0.1:9/x",
        "http://127.0.0.1:8",
    ]


async def test_a_removed_engine_of_the_settings_is_listed_as_removed(connection, file):
    await anyio.to_thread.run_sync(lambda: invoke("add", "http://127.0.0.1:8", file))
    for port, none_left in ((9, False), (8, True)):
        url = f"http://127.0.0.1:{port}"
        removed = await anyio.to_thread.run_sync(partial(invoke, "remove", url, file))
        assert removed["none_left"] is none_left
    named, _ = await anyio.to_thread.run_sync(lambda: invoke("list", file))
    assert (named["removed"], named["source"]) == (True, "settings")
    assert "@" in named["changed_by"]
    plain = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(penstock, ["engines", "list", file]))
    assert "removed by" in plain.stdout
    plain = await anyio.to_thread.run_sync(
        lambda: CliRunner().invoke(penstock, ["engines", "remove", "http://127.0.0.1:9", file])
    )
    assert "was removed from run" in plain.stdout
    assert "it was the last one" in plain.stdout


def test_a_malformed_url_is_refused_before_any_request():
    result = CliRunner().invoke(penstock, ["engines", "add", "engine-3"])
    assert result.exit_code == 2
    assert "'engine-3' is not the URL of an engine; write it as http://HOST:PORT" in result.output


async def test_discovery_without_engines_explains_why(connection):
    assert "engine.urls is empty" in EngineDiscovery(()).empty_reason
    discovery = await EngineDiscovery.from_settings(Engine(urls=("dns+http://no.such.host.invalid:8000",)), connection)
    assert "http://no.such.host.invalid:8000 (engine.urls) resolves to no address" in discovery.empty_reason
    await remove_engine(connection, "http://a:1", ANN)
    discovery = await EngineDiscovery.from_settings(Engine(urls=("http://a:1",)), connection)
    assert discovery.urls == ()
    assert "those in engine.urls were removed" in discovery.empty_reason
    assert "penstock engines add" in discovery.empty_reason
