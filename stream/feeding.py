"""Feeding: prompts enter the backlog, and the feeder's cursor moves with them in the same atomic step.

Public: anything may feed. A feeder that died, or a server that lost its last second, is met by reading the cursor
again.
"""

from collections.abc import Sequence

from stream.codec import encode
from stream.link import LONGEST_WAIT_S, Link
from stream.records import Prompt


class CursorMovedError(Exception):
    """Another feeder, or an earlier life of this one, stands elsewhere; `cursor` says where."""

    def __init__(self, cursor: str) -> None:
        super().__init__(f"the feeder's cursor is {cursor!r}")
        self.cursor = cursor


class Feed:
    """The way into the pipe.

    Args:
        link: the run's connection.
        backlog: prompts fed, but not yet claimed, at most.
    """

    def __init__(self, link: Link, backlog: int) -> None:
        self.link = link
        self.backlog = backlog

    async def cursor(self) -> str:
        """Where feeding stands; empty at the beginning."""
        return (await self.link.read_hash("feed")).get("cursor", "")

    async def put(self, prompts: Sequence[Prompt], before: str, after: str, *, passed: int = 0) -> int:
        """Feed a batch and move the cursor from `before` to `after`, once the backlog has room and the run goes on.

        Args:
            prompts: the batch; may be empty.
            before: the cursor that this batch follows.
            after: the cursor behind it.
            passed: prompts left out of it because the ledger holds their ends already; they count as fed.

        Returns:
            How many of them were new: a prompt that is still without an end is not fed a second time.

        Raises:
            CursorMovedError: the cursor is not `before`.
        """
        flat: list[str | bytes] = []
        for prompt in prompts:
            flat += [prompt.id, encode(prompt)]
        while True:
            status, value, stop = await self.link.script("feed", self.backlog, before, after, passed, *flat)
            self.link.hear(stop)
            if status == 1:
                return int(value)
            if status == -1:
                raise CursorMovedError(value.decode())
            await self.link.wait(value.decode(), LONGEST_WAIT_S)

    async def finish(self) -> None:
        """Say that nothing more will be fed."""
        await self.link.write_hash("feed", {"done": "1"})

    async def finished(self) -> str:
        """Why the run has ended; empty while it goes on."""
        return (await self.link.read_hash("meta")).get("finished", "")
