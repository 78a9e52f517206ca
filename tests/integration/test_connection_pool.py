"""The HTTP client of engines against servers that behave well, badly, and not at all."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from envs.remote.service_client import parse_retry_after
from stream.errors import EngineError
from tests.cases.authority import Authority
from tests.cases.ports import free_port
from workers.engine_api.connection_pool import ConnectionPool, RequestTimeoutError, UnreachableError
from workers.engine_api.http_connection import RequestTarget

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@dataclass
class RawServer:
    """Answers each request with bytes of a test's choice."""

    url: str = ""
    connections: int = 0
    open: int = 0
    requests: list[bytes] = field(default_factory=list)


Answer = Callable[[RawServer, asyncio.StreamWriter], Awaitable[None]]


def sends(*parts: bytes, close: bool = False) -> Answer:
    """Send these parts, one after the other."""

    async def answer(_server: RawServer, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01 if len(parts) > 1 else 0)
        if close:
            writer.close()

    return answer


async def never(_server: RawServer, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


@asynccontextmanager
async def serving(answer: Answer, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    server = RawServer()
    tasks: set[asyncio.Task] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        server.connections += 1
        server.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                server.requests.append(head + await reader.readexactly(length))
                answering = asyncio.ensure_future(answer(server, writer))
                waiting = asyncio.ensure_future(reader.read(1)) if answer is never else None
                await asyncio.wait({answering, *([waiting] if waiting else [])}, return_when="FIRST_COMPLETED")
                if waiting is not None:
                    answering.cancel()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            server.open -= 1
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", port, ssl=tls)
    server.url = f"http{'s' if tls else ''}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def get(pool: ConnectionPool, url: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    return await pool.request("GET", url, timeout_s)


@pytest.mark.parametrize(
    "parts",
    [
        (OK,),
        tuple(bytes([byte]) for byte in OK),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n", b"1\r\ni\r\n0\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", OK),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + OK,),
    ],
    ids=["whole", "byte by byte", "chunked", "after an interim answer", "interim in one piece"],
)
async def test_answers_are_read_and_their_connection_is_used_again(parts):
    async with serving(sends(*parts)) as server, ConnectionPool() as pool:
        for _ in range(2):
            assert await get(pool, server.url) == (200, b"hi")
        assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        sends(b"HTTP/1.1 200 OK\r\n\r\nhi", close=True),
        sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nhi", close=True),
        sends(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", close=True),
        sends(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi"),
        sends(OK + OK),
        sends(OK + b"junk"),
        sends(OK, b"junk"),
    ],
    ids=["length unknown", "not chunked", "HTTP/1.0", "close", "two answers", "junk behind", "junk later"],
)
async def test_an_answer_counts_although_its_connection_cannot_be_used_again(answer):
    async with serving(answer) as server, ConnectionPool() as pool:
        for _ in range(2):
            assert await get(pool, server.url) == (200, b"hi")
            await asyncio.sleep(0.03)
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (sends(b"\0\1\2"), EngineError, "not valid HTTP"),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), EngineError, "not valid HTTP"),
        (sends(OK[:-6] + b"\r\nTransfer-Encoding: chunked\r\n\r\n"), EngineError, "not valid"),
        (sends(b"HTTP/1.1 101 Go\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"), EngineError, "another protocol"),
        (sends(OK[:-6] + b"\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b"), EngineError, r"compressed \(gzip\)"),
        (sends(b"HTTP/1.1 100 Continue\r\n\r\n", close=True), UnreachableError, "closed the connection"),
        (sends(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n", close=True), UnreachableError, "closed"),
        (sends(b"", close=True), UnreachableError, "closed the connection"),
        (sends(b"HTTP/1.1 200 OK\r\n", close=True), UnreachableError, "closed the connection"),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi", close=True), UnreachableError, "closed"),
        (
            sends(b"HTTP/1.1 302 Found\r\nLocation: http://b/\r\nContent-Length: 0\r\n\r\n"),
            EngineError,
            "to http://b/;",
        ),
        (never, RequestTimeoutError, "no answer within 0.1 s"),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi"), RequestTimeoutError, "no answer within"),
    ],
    ids=[
        *("bytes", "negative", "two lengths", "upgrade", "gzip", "interim alone", "half a head behind it", "nothing"),
        *("half a head", "cut", "redirect", "never", "stuck"),
    ],
)
async def test_a_broken_answer_is_an_error_that_names_the_request_and_leaves_no_connection(answer, kind, message):
    async with serving(answer) as server, ConnectionPool() as pool:
        with pytest.raises(kind, match=message) as failed:
            await get(pool, f"{server.url}/path", 0.1)
        assert type(failed.value) is kind
        assert f"{server.url}/path" in str(failed.value)
        with anyio.fail_after(2):
            while server.open and kind is not EngineError:
                await asyncio.sleep(0.01)
        assert pool.connection_epoch(server.url) is None or "http://b/" in message


@pytest.mark.parametrize(
    ("begin", "part", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", b"x" * 60_000, "head has more than 1,000,000 bytes"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 10_000, "head has more than 1,000,000 bytes"),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 2_000, "head has more than 1,000,000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 60_000, "answer has more than 2,000,000 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000, "more than 2,000,000 bytes"),
    ],
    ids=["long header", "many headers", "many interim answers", "body until close", "small chunks"],
)
async def test_an_endless_answer_ends_with_an_error_long_before_its_deadline(monkeypatch, begin, part, message):
    monkeypatch.setattr("workers.engine_api.http_connection.MAX_ANSWER_BYTES", 2_000_000)

    async def endless(_server: RawServer, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while True:
            writer.write(part)
            await writer.drain()

    async with serving(endless) as server, ConnectionPool() as pool:
        with anyio.fail_after(5), pytest.raises(EngineError, match=message):
            await get(pool, server.url, 600)
        assert pool.connection_epoch(server.url) is None


async def test_a_connection_whose_request_was_answered_before_it_was_sent_is_not_used_again():
    writers = list[asyncio.StreamWriter]()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")  # and never the body
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")

    listener = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=1000)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with ConnectionPool() as pool:
        for _ in range(2):
            assert await pool.request("POST", url, 5, b" " * 20_000_000) == (413, b"no")
    listener.close()
    for writer in writers:
        writer.transport.abort()


async def test_port_zero_is_not_the_default_port():
    assert RequestTarget.parse("GET", "http://127.0.0.1:0/").server.port == 0


async def test_a_closed_port_is_unreachable():
    async with ConnectionPool() as pool:
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1"):
            await get(pool, f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize("url", ["nowhere", "ftp://x/", "http:///path", "http://h:port/", "http://h/a b", "http://h/ä"])
async def test_a_malformed_address_is_an_error_that_names_it(url):
    async with ConnectionPool() as pool:
        with pytest.raises(EngineError, match=url):
            await get(pool, url)


async def test_cancelling_a_request_closes_its_connection():
    async with serving(never) as server, ConnectionPool() as pool:
        with anyio.move_on_after(0.1):
            await pool.request("POST", server.url, 60, b"{}")
        with anyio.fail_after(2):
            while server.open:
                await asyncio.sleep(0.01)
        assert pool.connection_epoch(server.url) is None


async def test_requests_below_a_url_are_aborted_together():
    async with serving(never) as server, ConnectionPool() as pool:
        errors = []

        async def ask(path: str) -> None:
            with pytest.raises(EngineError) as failed:
                await get(pool, server.url + path, 60 if path.startswith("/one/") else 0.5)
            errors.append((path, str(failed.value)))

        async with anyio.create_task_group() as tasks:
            for path in ("/one/a", "/one/b", "/oneself"):
                tasks.start_soon(ask, path)
            while server.open < 3:
                await asyncio.sleep(0.01)
            pool.abort_requests(f"{server.url}/one", "gone")
        assert sorted(errors[:2]) == [("/one/a", "gone"), ("/one/b", "gone")]
        assert errors[2][0] == "/oneself"


@pytest.mark.parametrize(("method", "fails"), [("GET", False), ("POST", True)])
async def test_a_query_on_a_connection_that_closes_meanwhile_is_sent_again_and_nothing_else(method, fails):
    async def once_per_connection(server: RawServer, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            writer.close()  # instead of an answer
        else:
            writer.write(OK)

    async with serving(once_per_connection) as server, ConnectionPool() as pool:
        assert await get(pool, server.url) == (200, b"hi")
        if fails:
            with pytest.raises(UnreachableError):
                await pool.request(method, server.url, 5, b"{}")
        else:
            assert await pool.request(method, server.url, 5, b"{}") == (200, b"hi")
        assert len(server.requests) == (2 if fails else 3)


async def test_a_request_is_not_sent_a_third_time_nor_after_a_part_of_its_answer():
    async def badly(server: RawServer, writer: asyncio.StreamWriter) -> None:
        writer.write(OK if len(server.requests) == 1 else b"HTTP/1.1 2" if len(server.requests) == 2 else b"")
        if len(server.requests) > 1:
            writer.close()

    async with serving(badly) as server, ConnectionPool() as pool:
        await get(pool, server.url)
        with pytest.raises(UnreachableError):
            await get(pool, server.url)
        assert len(server.requests) == 2
        with pytest.raises(UnreachableError):
            await get(pool, server.url)
        assert len(server.requests) == 3, "a new connection is no reason to try again"


async def test_idle_connections_are_closed_and_parallel_ones_reused(monkeypatch):
    monkeypatch.setattr("workers.engine_api.connection_pool._KEEPALIVE_S", 0.2)

    async def slow(_server: RawServer, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(OK)

    async with serving(slow) as server, ConnectionPool() as pool:
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(get, pool, server.url)
        assert (server.connections, server.open) == (5, 5)
        with anyio.fail_after(2):
            while server.open:
                await asyncio.sleep(0.02)
        assert await get(pool, server.url) == (200, b"hi")
        assert server.connections == 6


async def test_a_pool_without_keep_alive_opens_a_connection_for_each_request():
    async with serving(sends(OK)) as server, ConnectionPool(keep_alive=False) as pool:
        for _ in range(3):
            await get(pool, server.url)
        assert server.connections == 3


async def test_a_server_that_takes_over_an_address_does_not_continue_the_one_before():
    port = free_port()
    async with ConnectionPool() as pool:
        async with serving(sends(OK), port) as server:
            assert pool.connection_epoch(server.url) is None
            await get(pool, server.url)
            before = pool.connection_epoch(server.url)
            await get(pool, server.url)
            assert before is not None
            assert pool.connection_epoch(server.url) == before
        await asyncio.sleep(0.02)
        async with serving(sends(OK), port) as server:
            assert pool.connection_epoch(server.url) is None
            await get(pool, server.url)
            assert pool.connection_epoch(server.url) not in (None, before)


async def test_a_server_with_tls_is_asked_if_its_certificate_is_trusted(tmp_path, monkeypatch):
    authority = await anyio.to_thread.run_sync(Authority, tmp_path, "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*await anyio.to_thread.run_sync(authority.issue, "server"))
    async with serving(sends(OK), tls=context) as server:
        async with ConnectionPool() as pool:
            with pytest.raises(UnreachableError, match="certificate verify failed"):
                await get(pool, server.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        async with ConnectionPool() as pool:
            for _ in range(2):
                assert await get(pool, server.url) == (200, b"hi")
    assert len(server.requests) == 2


async def test_what_is_sent():
    async with serving(sends(OK)) as server, ConnectionPool() as pool:
        await pool.request("POST", server.url.replace("//", "//user:p%20w@") + "/a?b=c", 5, (b"{", b"}"))
    (request,) = server.requests
    head, _, body = request.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /a?b=c HTTP/1.1"
    assert f"Host: {server.url[7:]}".encode() in lines
    assert b"Content-Type: application/json" in lines
    assert b"Accept-Encoding: identity" in lines
    assert b"Authorization: Basic dXNlcjpwIHc=" in lines
    assert (lines[-1], body) == (b"Content-Length: 2", b"{}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("99999999999999", 60.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 60.0),
        ("-3", None),
        ("soon", None),
        ("", None),
    ],
)
def test_the_time_after_which_to_ask_again_is_bounded(text, seconds):
    assert parse_retry_after(text) == seconds
