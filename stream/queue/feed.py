"""Feeding: prompts enter the backlog, and the feeder's cursor moves with them in the same atomic step.

Public: anything may feed. A feeder that died, or a server that lost its last second, is met by reading the cursor
again.
"""

from collections.abc import Sequence

from stream.codec import encode
from stream.connection.run_connection import MAX_BLOCK_S, RunConnection
from stream.records import Prompt


class CursorMovedError(Exception):
    """Another feeder, or an earlier life of this one, stands elsewhere; `cursor` says where."""

    def __init__(self, cursor: str) -> None:
        super().__init__(f"the feeder's cursor is {cursor!r}")
        self.cursor = cursor


class Feed:
    """The way into the pipe.

    Args:
        connection: the run's connection.
        max_queued_prompts: prompts fed, but not yet claimed, at most.
    """

    def __init__(self, connection: RunConnection, max_queued_prompts: int) -> None:
        self.connection = connection
        self.max_queued_prompts = max_queued_prompts

    async def cursor(self) -> str:
        """Where feeding stands; empty at the beginning."""
        return (await self.connection.read_hash("feed")).get("cursor", "")

    async def put(
        self, prompts: Sequence[Prompt], cursor_before: str, cursor_after: str, *, already_ended: int = 0
    ) -> int:
        """Feed a batch and move the cursor from `before` to `after`, once the backlog has room and the run goes on.

        Args:
            prompts: the batch; may be empty.
            cursor_before: the cursor that this batch follows.
            cursor_after: the cursor behind it.
            already_ended: prompts left out of it because the ledger holds their ends already; they count as fed.

        Returns:
            How many of them were new: a prompt that is still without an end is not fed a second time.

        Raises:
            CursorMovedError: the cursor is not `before`.
        """
        flat: list[str | bytes] = []
        for prompt in prompts:
            flat += [prompt.id, encode(prompt)]
        while True:
            status, value, stop = await self.connection.run_script(
                "feed", self.max_queued_prompts, cursor_before, cursor_after, already_ended, *flat
            )
            self.connection.observe_stop(stop)
            if status == 1:
                return int(value)
            if status == -1:
                raise CursorMovedError(value.decode())
            await self.connection.wait_for_change(value.decode(), MAX_BLOCK_S)

    async def finish(self) -> None:
        """Say that nothing more will be fed."""
        await self.connection.write_hash("feed", {"done": "1"})

    async def finish_reason(self) -> str:
        """Why the run has ended; empty while it goes on."""
        return (await self.connection.read_hash("meta")).get("finished", "")
