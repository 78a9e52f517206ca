"""The proxy that fault tests put between client and server: it forwards everything, and fails as configured."""

import asyncio
import socket
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from tests.soak.proxy import Fault, Proxy, address_of, at_random

ANSWER = b"0123456789"


async def answer(questions, answers) -> None:
    with suppress(OSError):
        while await questions.read(100):
            answers.write(ANSWER)
            await answers.drain()
    answers.close()


@asynccontextmanager
async def server(path=None):
    """Answer every request with ten digits; yield the server's address."""
    listening = await (
        asyncio.start_unix_server(answer, path) if path else asyncio.start_server(answer, "127.0.0.1", 0)
    )
    async with listening:
        yield path or listening.sockets[0].getsockname()


async def connect(proxy: Proxy):
    address = address_of(proxy.url("http"))
    return await (anyio.connect_tcp(*address) if isinstance(address, tuple) else anyio.connect_unix(address))


async def ask(client) -> bytes:
    await client.send(b"?")
    return await client.receive()


@pytest.fixture
async def proxied(tmp_path):
    async with server() as address, Proxy(address) as proxy:
        yield proxy


@pytest.mark.parametrize("behind", ["tcp", "unix"])
@pytest.mark.parametrize("before", ["tcp", "unix"])
async def test_without_a_fault_plan_everything_passes(tmp_path, behind, before):
    async with (
        server(tmp_path / "server" if behind == "unix" else None) as address,
        Proxy(address, at=tmp_path / "proxy" if before == "unix" else None) as proxy,
    ):
        for _ in range(3):
            async with await connect(proxy) as client:
                assert [await ask(client) for _ in range(2)] == [ANSWER] * 2
    assert (proxy.connections, proxy.answers, proxy.struck) == (3, 6, {})


async def test_each_fault_has_the_named_effect(proxied):
    async def strike(kind: str):
        proxied.plan = lambda *_: Fault(kind, 0.2)
        return await connect(proxied)

    async with await strike("delay") as client:
        with anyio.move_on_after(0.1):
            raise AssertionError(await ask(client))
        assert await client.receive() == ANSWER
    async with await strike("garble") as client:
        reply = await ask(client)
        assert sorted(was ^ now for was, now in zip(ANSWER, reply, strict=True)) == [0] * 9 + [0x80]
    async with await strike("truncate") as client:
        assert await ask(client) == ANSWER[:5]
        with pytest.raises(anyio.EndOfStream):
            await client.receive()
    async with await strike("stall") as client:
        with anyio.move_on_after(0.3):
            raise AssertionError(await ask(client))
    async with await strike("fin") as client:
        with pytest.raises(anyio.EndOfStream):
            await ask(client)
    async with await strike("rst") as client:
        with pytest.raises(anyio.BrokenResourceError) as caught:
            await ask(client)
        assert isinstance(caught.value.__cause__, ConnectionResetError)
    assert proxied.struck == dict.fromkeys(("delay", "garble", "truncate", "stall", "fin", "rst"), 1)


async def test_delayed_bytes_arrive(proxied):
    async with await connect(proxied) as client:
        assert await ask(client) == ANSWER
        proxied.hold()
        await client.send(b"?")
        with anyio.move_on_after(0.1):
            raise AssertionError(await client.receive())
        proxied.flow()
        assert await client.receive() == ANSWER


@pytest.mark.parametrize("kind", ["fin", "rst"])
async def test_all_connections_can_be_cut_and_new_ones_are_accepted(proxied, kind):
    clients = [await connect(proxied) for _ in range(3)]
    for client in clients:
        assert await ask(client) == ANSWER
    proxied.cut(kind)
    for client in clients:
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await client.receive()
        await client.aclose()
    async with await connect(proxied) as client:
        assert await ask(client) == ANSWER


async def test_connections_are_refused_if_the_server_is_gone():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with Proxy(nobody.getsockname()) as proxy, await connect(proxy) as client:
            with pytest.raises(anyio.BrokenResourceError):
                await ask(client)


def test_a_seed_determines_the_fault_plan():
    faults = [Fault("fin"), Fault("rst"), Fault("garble")]

    def drawn(seed: int, **most: int) -> list[Fault | None]:
        plan = at_random(seed, faults, every=5, **most)
        return [plan(number, b"") for number in range(1000)]

    assert drawn(1) == drawn(1) != drawn(2)
    struck = [fault for fault in drawn(1) if fault]
    assert 100 < len(struck) < 300
    assert max(struck.count(fault) for fault in faults) - min(struck.count(fault) for fault in faults) <= 1
    assert len([fault for fault in drawn(1, most=7) if fault]) == 7
