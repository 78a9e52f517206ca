"""The disk under a private server is full: clients wait, the cause is logged, and nothing is lost."""

import subprocess
from contextlib import suppress

import anyio
import pytest
import structlog

from stream.connection.run_connection import connect
from stream.errors import ServerError
from stream.private_server import private_server
from stream.queue.feed import Feed
from stream.records import Prompt

PROMPTS, PROMPT_BYTES = 40, 50_000


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for about half of the prompts."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this user may not mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("fsync", ["everysec", "always"])
async def test_the_feeder_waits_for_room_and_every_prompt_is_fed_once(small_disk, run_name, fsync):
    async with (
        private_server(small_disk / "redis", fsync=fsync) as url,
        connect(url, run_name, reconnect_s=30.0) as connection,
    ):
        feed = Feed(connection, max_queued_prompts=1000)

        async def feed_all() -> None:
            for i in range(PROMPTS):
                prompt = Prompt(id=f"p{i:02}", messages=[{"role": "user", "content": "x" * PROMPT_BYTES}])
                await feed.put([prompt], str(i or ""), str(i + 1))

        with structlog.testing.capture_logs() as logs, anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed_all)
                while not any("No space left" in str(event) for event in logs):
                    await anyio.sleep(0.02)
                remount = ["mount", "-o", "remount,size=64m", str(small_disk)]
                await anyio.run_process(remount)
        entries = await connection.redis.xrange(connection.key("prompts"))
        assert [fields[b"prompt"].decode() for _, fields in entries] == [f"p{i:02}" for i in range(PROMPTS)]
        assert (await connection.read_hash("counts"))["fed"] == str(PROMPTS)


async def test_a_start_on_a_full_disk_names_it_and_takes_no_data_for_damaged(tiny_disk, run_name):
    data = tiny_disk / "redis"
    async with private_server(data) as url, connect(url, run_name) as connection:
        await connection.write_hash("feed", {"text": "x" * 5000})

    def fill() -> None:
        with (tiny_disk / "ballast").open("ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    await anyio.to_thread.run_sync(fill)
    try:
        async with private_server(data) as url, connect(url, run_name, reconnect_s=1.0) as connection:
            assert (await connection.read_hash("feed"))["text"] == "x" * 5000, "it can be read"
    except ServerError as error:
        assert "No space left" in str(error)  # noqa: PT017  (whether it starts depends on the server)
        assert str(data) in str(error)  # noqa: PT017
    assert not list(data.glob("damaged-*"))
