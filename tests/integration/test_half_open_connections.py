"""Connections that bring no request: they end, their number has a limit, and clients with requests get in."""

import socket
from contextlib import closing
from functools import partial
from urllib.parse import urlsplit

import aiohttp
import anyio
import anyio.to_thread
import pytest
from aiohttp import web
from anyio.abc import SocketStream
from structlog.testing import capture_logs

from tests.cases.half_open import BEGINNINGS, HalfOpen
from tests.cases.servers import SERVERS, served
from workers.engine_api import http_connections
from workers.engine_api.http_server import listen

FILES = 128
LIMIT = FILES // 2


@pytest.fixture
def few_files(monkeypatch):
    """Servers believe that their process may open few files."""
    monkeypatch.setattr(http_connections, "_max_files", lambda: FILES)


@pytest.fixture
def impatient(monkeypatch):
    """Servers wait for fractions of a second."""
    for name in ("HEAD_S", "IDLE_S", "BODY_S", "STALLED_S"):
        monkeypatch.setattr(http_connections, name, 0.3)


async def status(url: str, **headers: str) -> int:
    """Ask a server by a connection of its own."""
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, headers=headers) as response:
        return response.status


async def left_of(clients: HalfOpen, most: int) -> int:
    """Wait until at most so many connections are open; return how many."""
    with anyio.fail_after(20):
        while (left := await anyio.to_thread.run_sync(clients.drop_closed)) > most:
            await anyio.sleep(0.05)
    return left


async def connected(url: str) -> SocketStream:
    return await anyio.connect_tcp("127.0.0.1", urlsplit(url).port or 0)


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.usefixtures("few_files")
async def test_requests_are_answered_beside_more_half_open_connections_than_the_limit(name, tmp_path, pipe, redis_url):
    with capture_logs() as logs:
        async with served(name, tmp_path, pipe, redis_url) as server:
            with closing(HalfOpen(server.url)) as clients:
                for _ in range(3):
                    await anyio.to_thread.run_sync(clients.open, LIMIT)
                    assert await status(f"{server.url}/health", **server.headers) in (200, 404)  # some have no /health
                assert await left_of(clients, LIMIT) > LIMIT // 2
            notes = [entry for entry in logs if entry["event"] == "http.connections_limited"]
    assert [note["limit"] for note in notes] == [LIMIT]  # one line, though dozens were ended


@pytest.mark.parametrize(
    "beginning", [b"", b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["nothing", "a whole request"]
)
@pytest.mark.usefixtures("few_files")
async def test_the_connection_that_has_waited_longest_for_its_client_makes_room_for_the_newest(beginning):
    """A client that has just connected is about to send its request."""
    async with listen(web.Application(), "127.0.0.1", 0) as url:
        with closing(HalfOpen(url)) as older, closing(HalfOpen(url)) as newer:
            await anyio.to_thread.run_sync(partial(older.open, LIMIT, [beginning]))
            assert await status(url) == 404  # so all of them are accepted
            await anyio.to_thread.run_sync(partial(newer.open, LIMIT // 2, [b""]))
            assert await status(url) == 404
            assert await left_of(older, LIMIT // 2) >= LIMIT // 2 - 3  # the two requests, and this one's neighbor
            assert await anyio.to_thread.run_sync(newer.drop_closed) == LIMIT // 2


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.usefixtures("impatient")
async def test_a_connection_whose_request_does_not_arrive_ends(beginning, tmp_path, pipe, redis_url):
    async with served("local engine", tmp_path, pipe, redis_url) as server:
        with closing(HalfOpen(server.url)) as clients:
            await anyio.to_thread.run_sync(partial(clients.open, 5, [BEGINNINGS[beginning]]))
            await left_of(clients, 0)


@pytest.mark.usefixtures("impatient")
async def test_a_request_that_takes_long_to_answer_is_not_cut_and_its_connection_serves_the_next():
    """The times are limits of arriving, not of answering."""
    app = web.Application()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await anyio.sleep(1.0)
        return web.Response(text="done")

    app.router.add_route("*", "/", answer)
    async with listen(app, "127.0.0.1", 0) as url, aiohttp.ClientSession(url) as session:
        for _ in range(2):
            async with session.post("/", json={}) as response:
                assert (response.status, await response.text()) == (200, "done")
        async with session.get("/") as response:
            assert response.status == 200


@pytest.mark.usefixtures("impatient")
async def test_requests_that_are_sent_at_once_over_one_connection_are_all_answered():
    app = web.Application()

    async def answer(_: web.Request) -> web.Response:
        await anyio.sleep(0.4)
        return web.Response(text="done")

    app.router.add_get("/", answer)
    async with listen(app, "127.0.0.1", 0) as url, await connected(url) as stream:
        await stream.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        received = b""
        with anyio.fail_after(10):
            while received.count(b"done") < 3:
                received += await stream.receive()


@pytest.mark.usefixtures("impatient")
async def test_an_idle_connection_ends():
    app = web.Application()
    async with listen(app, "127.0.0.1", 0) as url, await connected(url) as stream:
        await stream.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 404")
        with anyio.fail_after(10), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_does_not_read_its_answer_is_not_waited_for():
    ended = anyio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 1_000_000)
        finally:
            ended.set()

    app = web.Application()
    app.router.add_get("/", answer)
    async with listen(app, "127.0.0.1", 0) as url:
        with closing(socket.create_connection(("127.0.0.1", urlsplit(url).port or 0))) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with anyio.fail_after(10):
                await ended.wait()


@pytest.mark.usefixtures("few_files")
async def test_connections_that_wait_for_answers_make_no_room_and_a_further_one_waits():
    release, waiting = anyio.Event(), []

    async def answer(_: web.Request) -> web.Response:
        waiting.append(1)
        await release.wait()
        return web.Response(text="done")

    app = web.Application()
    app.router.add_get("/", answer)
    results: list[int] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with listen(app, "127.0.0.1", 0) as url, aiohttp.ClientSession(url, connector=connector) as session:

        async def ask() -> None:
            async with session.get("/") as response:
                results.append(response.status)

        async with anyio.create_task_group() as tasks:
            for _ in range(LIMIT):
                tasks.start_soon(ask)
            with anyio.fail_after(10):
                while len(waiting) < LIMIT:
                    await anyio.sleep(0.01)
            async with await connected(url) as stream:
                await stream.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                with anyio.move_on_after(0.5) as waited:
                    await stream.receive()
                assert waited.cancelled_caught
                assert len(waiting) == LIMIT
                release.set()
                with anyio.fail_after(10):
                    assert (await stream.receive()).startswith(b"HTTP/1.1 200")
    assert results == [200] * LIMIT


def test_a_port_whose_last_connection_has_just_ended_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # of a connection, the side that closes first waits for a minute
            assert client.recv(1) == b""
    assert http_connections.free_port("127.0.0.1", port) == port
