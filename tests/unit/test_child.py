"""Quoted output of a process that ended."""

import sys

import anyio

from workers.launch.children import ChildProcess
from workers.launch.specs import ProcessSpec

GROUP = "raise ExceptionGroup('', [ExceptionGroup('', [OSError('No space left on device')])])"


async def test_the_innermost_exception_of_a_group_is_quoted_without_its_frame(tmp_path):
    child = ChildProcess(ProcessSpec(role="feed", command=(sys.executable, "-c", GROUP)), tmp_path)
    assert await child.run() == 1
    assert "No space left on device" in (tmp_path / "feed-0.log").read_text()
    assert await anyio.to_thread.run_sync(child.last_error) == "OSError: No space left on device"
