"""Feeding: prompts are added to the backlog, and the feeder's cursor moves in the same atomic step.

Any program may feed. After a crash, or after a server lost its last writes, the feeder reads the cursor again and
continues from there.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import structlog

from stream.codec import encode
from stream.connection.run_connection import MAX_BLOCK_S, RunConnection
from stream.records import Prompt

log = structlog.get_logger()

_MEMORY_SHORT = -2


class CursorMovedError(Exception):
    """The cursor is not the expected one, because another feeder moved it; `cursor` is its value now."""

    def __init__(self, cursor: str) -> None:
        super().__init__(f"the feeder's cursor is {cursor!r}")
        self.cursor = cursor


class Feed:
    """Adds prompts to a run.

    Args:
        connection: to the run.
        max_queued_prompts: how many prompts may be fed but not yet claimed.
    """

    def __init__(self, connection: RunConnection, max_queued_prompts: int) -> None:
        self.connection = connection
        self.max_queued_prompts = max_queued_prompts

    async def cursor(self) -> str:
        """Return the position of feeding; empty at the beginning."""
        return (await self.connection.read_hash("feed")).get("cursor", "")

    async def put(
        self,
        prompts: Sequence[Prompt],
        cursor_before: str,
        cursor_after: str,
        *,
        ended: Mapping[str, str] = MappingProxyType({}),
    ) -> int:
        """Feed a batch and move the cursor; waits while the backlog or the memory is full, or the run is paused.

        Args:
            prompts: the batch; may be empty.
            cursor_before: the cursor that this batch follows.
            cursor_after: the cursor after it.
            ended: end of prompts that the ledger has, by id (`stream.trainer.ledger.LedgerContents.ends`). They are not
                fed but counted; a dead one is a dead letter again. For a server that was emptied.

        Returns:
            How many prompts were new: a prompt that the server knows is not fed a second time.

        Raises:
            CursorMovedError: the cursor is not `cursor_before`.
        """
        flat: list[str | bytes] = []
        for prompt in prompts:
            end = ended.get(prompt.id, "")
            flat += [prompt.id, b"" if end and not end.startswith("dead:") else encode(prompt), end]
        logged = False
        while True:
            status, value, stop = await self.connection.run_script(
                "feed", *(self.max_queued_prompts, cursor_before, cursor_after), *flat
            )
            self.connection.observe_stop(stop)
            if status == 1:
                return int(value)
            if status == -1:
                raise CursorMovedError(value.decode())
            if status == _MEMORY_SHORT and not logged:
                log.warning("feed.waiting", why="the server's memory is needed for groups; see maxmemory")
                logged = True
            await self.connection.wait_for_change(value.decode(), MAX_BLOCK_S)

    async def finish(self) -> None:
        """Record that nothing more will be fed."""
        await self.connection.write_hash("feed", {"done": "1"})

    async def finish_reason(self) -> str:
        """Return why the run has ended; empty while it continues."""
        return (await self.connection.read_hash("meta")).get("finished", "")
