"""A garbled reply costs its connection, and the call is repeated."""

import contextlib
import random
from collections.abc import Callable

import anyio
import pytest

from stream.connection import run_connection
from stream.connection.run_connection import connect
from stream.errors import LeaseLostError, ServerError
from stream.operator.status import read_status

Garble = Callable[[bytes], bytes | None]
"""Changes a piece of a reply; None ends the connection."""


def straight(reply: bytes) -> bytes:
    return reply


class Proxy:
    """Stands between a client and the server, on a separate socket."""

    def __init__(self, url: str, folder) -> None:
        self.server, self.socket = url.removeprefix("unix://"), str(folder / "proxy.sock")
        self.url = f"unix://{self.socket}"
        self.garble: Garble = straight
        self.connections = 0

    async def serve(self, *, task_status) -> None:
        async with await anyio.create_unix_listener(self.socket) as listener:
            task_status.started()
            await listener.serve(self._pass_on)

    async def _pass_on(self, client) -> None:
        self.connections += 1
        async with client, await anyio.connect_unix(self.server) as server, anyio.create_task_group() as tasks:

            async def back() -> None:
                async for reply in server:
                    garbled = self.garble(reply)
                    if garbled is None:
                        break
                    await client.send(garbled)
                tasks.cancel_scope.cancel()

            tasks.start_soon(back)
            try:
                async for request in client:
                    await server.send(request)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
            tasks.cancel_scope.cancel()

    def next_reply(self, becomes: Garble) -> None:
        """Garble the next piece of a reply only."""

        def once(reply: bytes) -> bytes | None:
            self.garble = straight
            return becomes(reply)

        self.garble = once


@pytest.fixture
async def proxy(redis_url, tmp_path):
    result = Proxy(redis_url, tmp_path)
    async with anyio.create_task_group() as tasks:
        await tasks.start(result.serve)
        yield result
        tasks.cancel_scope.cancel()


@pytest.fixture
async def connection(proxy, run_name):
    async with connect(proxy.url, run_name, reconnect_s=5.0) as result:
        yield result


WAYS: dict[str, Garble] = {
    "another first byte": lambda reply: b"\x15" + reply[1:],
    "a length that is none": lambda reply: reply[:1] + b"x" + reply[2:],
    "a length beyond all measure": lambda reply: b"*4294967296\r\n",
    "half of it, and the end": lambda reply: None,
    "an error that is cut": lambda reply: b"-MOVED 12\r\n",
    "an error in no alphabet": lambda reply: b"-MOVED \xff\xfe \xff\r\n",
    "a number instead of a list": lambda reply: b":5\r\n",
    "a list of numbers": lambda reply: b"*2\r\n:5\r\n:6\r\n",
    "another language": lambda reply: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "what the server says to a request it cannot read": lambda reply: b"-ERR Protocol error: unbalanced quotes\r\n",
    "more than one reply": lambda reply: b"+OK\r\n" + reply,
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_with_a_garbled_reply_is_repeated(connection, proxy, way):
    await connection.write_hash("feed", {"cursor": "12"})
    proxy.next_reply(WAYS[way])
    with anyio.fail_after(10):
        assert await connection.read_hash("feed") == {"cursor": "12"}
        assert await connection.read_hash("feed") == {"cursor": "12"}


@pytest.mark.parametrize("way", ["another first byte", "a length that is none", "an error that is cut"])
async def test_a_script_with_a_garbled_reply_is_repeated_and_changes_nothing_twice(connection, proxy, pipe_on, way):
    pipe = pipe_on(connection)
    await pipe.rolled_out("z")  # so that the server has the scripts loaded, and the garbled reply is a script's
    await pipe.feed("a", "b")
    worker = pipe.stage("prompts")
    (lease,) = (await worker.claim(1)).leases
    before = proxy.connections
    stored = b"+OK\r\n"  # the answer to the command before the script, which stores the group
    proxy.next_reply(lambda reply: stored + WAYS[way](reply.removeprefix(stored)))
    with pytest.raises(LeaseLostError):  # the first call completed the entry, so the repeated one finds no lease
        await worker.complete(lease, "groups", pipe.group("a"))
    assert proxy.connections > before
    proxy.next_reply(WAYS[way])
    await pipe.feed("c")
    status = await read_status(connection)
    assert (status.counts, status.stages["groups"].depth) == ({"fed": 4}, 2)
    await pipe.prompt_counts()


async def test_permanently_garbled_replies_are_an_error_after_the_timeout(connection, proxy):
    proxy.garble = WAYS["another first byte"]
    connection.reconnect_s = 0.5
    with anyio.fail_after(10), pytest.raises(ServerError, match=r"did not answer for 0\.5 s.*Protocol error, got"):
        await connection.read_hash("meta")


@pytest.mark.full
async def test_with_random_garbling_calls_succeed_or_raise_server_error(connection, proxy, monkeypatch):
    """Only the protocol is garbled; checksums detect altered payloads."""
    rng = random.Random(7)

    def one_byte(reply: bytes) -> bytes:
        altered = bytearray(reply)
        altered[rng.randrange(min(len(altered), 4))] = rng.randrange(256)
        return bytes(altered) if rng.random() < 0.5 else reply

    await connection.write_hash("feed", {"cursor": "12"})
    connection.reconnect_s = 0.5
    monkeypatch.setattr(run_connection, "_ANSWER_TIMEOUT_S", 0.05)  # a longer length makes the client wait
    for _ in range(60):
        proxy.garble = one_byte
        with contextlib.suppress(ServerError):
            await connection.read_hash("feed")
        proxy.garble = straight
        assert await connection.read_hash("feed") == {"cursor": "12"}
