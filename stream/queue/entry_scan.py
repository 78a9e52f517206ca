"""Read the entries of streams without their payloads, in small batches. Changes nothing."""

from collections.abc import AsyncIterator, Awaitable
from typing import Literal, cast

from msgspec import Struct

from stream.connection.keys import EVALUATION_STAGES
from stream.connection.run_connection import RunConnection

_ENTRIES_PER_SCRIPT = 500
"""Not more, since the server reads whole entries to find their ids, and an entry of `prompts` contains its record."""


class StreamEntry(Struct, frozen=True):
    """An entry of a stage."""

    stage: str
    id: str
    prompt: str
    """Id of its prompt; empty for a foreign entry without one."""
    marked: bool = False
    """Whether the trainer has ended it and not acknowledged it yet."""


class DeadEntry(Struct, frozen=True):
    """A dead letter."""

    id: str
    stage: str
    prompt: str
    reason: str
    error: str
    ends_prompt: bool
    """True if one of the run's prompts ended with it; False for foreign entries and duplicates."""


async def scan_stage(
    connection: RunConnection, stage: Literal["prompts", "groups", "scored"]
) -> AsyncIterator[StreamEntry]:
    """Yield all entries of a stage, oldest first."""
    async for entry_id, marked, (prompt,) in _scan(connection, stage, "prompt"):
        yield StreamEntry(stage, entry_id, prompt, marked)


async def scan_dead_entries(connection: RunConnection) -> list[DeadEntry]:
    """Return all dead letters, except those of evaluations, which are not prompts of the run."""
    fields = ("stage", "prompt", "reason", "error", "ends_prompt")
    return [
        DeadEntry(letter, stage, prompt, reason, error, ends_prompt == "1")
        async for letter, _, (stage, prompt, reason, error, ends_prompt) in _scan(connection, "dead", *fields)
        if stage not in EVALUATION_STAGES
    ]


async def scan_dead_page(connection: RunConnection, after: str = "-") -> list[DeadEntry]:
    """Return at most 500 dead letters after the one with id `after`, oldest first; `-`: from the first one on."""
    fields = ("stage", "prompt", "reason", "error", "ends_prompt")
    letters = await connection.run_script("scan_entries", "dead", after, _ENTRIES_PER_SCRIPT, *fields)
    return [
        DeadEntry(entry_id.decode(), stage, prompt, reason, error, ends_prompt == "1")
        for entry_id, _, *values in letters
        for stage, prompt, reason, error, ends_prompt in [[value.decode(errors="replace") for value in values]]
    ]


async def _scan(connection: RunConnection, stream: str, *fields: str) -> AsyncIterator[tuple[str, bool, list[str]]]:
    """Yield each entry's id, whether it is marked, and some of its fields."""
    after = "-"
    while batch := await connection.run_script("scan_entries", stream, after, _ENTRIES_PER_SCRIPT, *fields):
        for entry_id, marked, *values in batch:
            after = entry_id.decode()
            yield after, bool(marked), [value.decode(errors="replace") for value in values]


async def read_payload(connection: RunConnection, stream: str, entry_id: str) -> bytes | None:
    """Return the record of an entry of `groups`, `scored` or `dead`; None if the entry has none, or has ended."""
    key = connection.key(f"{stream}:payload:{entry_id}")
    return await connection.with_retry(lambda: cast("Awaitable[bytes | None]", connection.redis.get(key)))
