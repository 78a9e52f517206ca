"""A stream that the worker has written to its end is cut on its way: the program asks again, and gets the same turn."""

import anyio
import pytest

from envs.programs import agent_program
from stream.validity import Measured
from tests.agents.played import ScriptedModel, play
from tests.agents.test_programs import PROGRAMS, says

pytestmark = [pytest.mark.agents, pytest.mark.timeout(90)]

LAST = {
    "claude-code": b"event: message_stop",
    "codex": b"event: response.completed",
    "opencode": b"data: [DONE]",
}
"""What stands in the last event of an answer."""


class Cut:
    """Passes connections on, but of the first streamed answer only its first events.

    Args:
        last: stands in the last event.
        events: that are passed on.
    """

    def __init__(self, last: bytes, events: int) -> None:
        self.count = 0
        """Answers that were cut."""
        self._last, self._events = last, events

    async def pass_on(self, client, host, port, elsewhere):
        async def upwards(server):
            try:
                async for data in client:
                    await server.send(data)
                await server.send_eof()
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass

        async with client, await anyio.connect_tcp(host, port) as server, anyio.create_task_group() as tasks:
            tasks.start_soon(upwards, server)
            kept = b""
            try:
                async for data in server:
                    kept += data
                    if self.count or (b"\r\n\r\n" in kept and b"text/event-stream" not in kept):
                        await client.send(kept)
                        kept = b""
                    elif self._last in kept and kept.rstrip().endswith(b"0"):  # the last chunk: all was written
                        self.count += 1
                        head, _, body = kept.partition(b"\r\n\r\n")
                        events = body.split(b"\n\n")
                        await client.send(head + b"\r\n\r\n" + b"\n\n".join([*events[: self._events], b""]))
                        break
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("events", [0, 1, 3])
@pytest.mark.parametrize("name", LAST)
async def test_a_program_whose_stream_was_cut_behind_the_worker_gets_the_turn_that_was_sampled(
    name, events, monkeypatch, measured
):
    cut = Cut(LAST[name], events)
    monkeypatch.setattr(agent_program, "pass_on", cut.pass_on)
    script = says(PROGRAMS[name])
    model = ScriptedModel(script)
    played = await play(PROGRAMS[name].ref, script, model=model)
    measured(played)
    assert cut.count == 1
    assert sum(played.seen.routes.values()) == 3
    assert len(model.sampled) == 2
    assert played.reward == Measured(1.0), played.program.output[-2000:]
    assert len(played.completion.rows) == 1
    played.check_exact()
