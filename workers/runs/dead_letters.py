"""The dead letters of a run: which ones are meant, what they say, and how an operator retries or drops them."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import anyio
import msgspec
from msgspec import Struct

from stream.codec import decode
from stream.connection.keys import PROMPT_STAGES
from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError, RecordError
from stream.operator.dead_letters import DeadLetter, list_dead_letters
from stream.operator.status import read_status
from stream.records import Group, Prompt, Row
from stream.trainer.consume import write_unrecorded_outcomes
from workers.runs.find import refuse_other_run
from workers.runs.run import Run

Change = Callable[[RunConnection, Sequence[str]], Awaitable[list[str]]]
"""Changes letters by id. Returns the ids of those that were not there any more."""

_HEX_BYTES: Final = 512


class LetterChoice(Struct, frozen=True):
    """Which dead letters a command is about; the default is all."""

    ids: tuple[str, ...] = ()
    """Only these; empty: all that match."""
    reason: str = ""
    """Only those with this reason, or with this text in their error; empty: any."""

    def matches(self, letter: DeadLetter) -> bool:
        """Whether a letter has the reason."""
        return not self.reason or letter.reason == self.reason or self.reason in letter.error


async def select_letters(connection: RunConnection, choice: LetterChoice) -> list[DeadLetter]:
    """Return the chosen dead letters, oldest first.

    Raises:
        PenstockError: a named one does not exist, or none has the reason.
    """
    if not choice.ids:
        status = await read_status(connection)
        letters = await list_dead_letters(connection, count=max(1, status.dead))
        found = [letter for letter in letters if choice.matches(letter)]
        if choice.reason and not found:
            raise PenstockError(
                f"none of the {len(letters)} dead letters of run {connection.run!r} has the reason "
                f"{choice.reason!r}, or this text in its error"
            )
        return found
    found = [
        letter for one in dict.fromkeys(choice.ids) for letter in await list_dead_letters(connection, letter_id=one)
    ]
    missing = sorted(set(choice.ids) - {letter.id for letter in found})
    if missing:
        raise PenstockError(
            f"run {connection.run!r} has no dead letter {', '.join(missing)}; `penstock dead list` shows them"
        )
    return found


async def change_letters(run: Run, connection: RunConnection, choice: LetterChoice, change: Change) -> list[DeadLetter]:
    """Retry or drop dead letters, and write what became of them to the ledger. Returns those that were changed.

    Raises:
        RunMismatchError: the server has another run of this name; nothing was changed.
        PenstockError: a named letter does not exist, or none has the reason.
    """
    await refuse_other_run(run, connection)
    chosen = await select_letters(connection, choice)
    try:
        absent = await change(connection, [letter.id for letter in chosen])
    finally:  # a letter that is refused does not undo the others
        await record_ends(run, connection)
    return [letter for letter in chosen if letter.id not in absent]


async def record_ends(run: Run, connection: RunConnection) -> None:
    """Write to the ledger what operators did with dead letters, if the run has one here."""
    ledger = run.file("ledger.jsonl")
    if await anyio.Path(ledger).exists():
        await write_unrecorded_outcomes(connection, ledger)


def describe_letter(letter: DeadLetter) -> dict[str, Any]:
    """Return the fields of a dead letter without its payload."""
    facts = {name: getattr(letter, name) for name in letter.__struct_fields__ if name != "payload"}
    return facts | {"cause": letter.cause, "died_at": died_at(letter).isoformat(timespec="seconds")}


def died_at(letter: DeadLetter) -> datetime:
    """Return when a letter died."""
    return datetime.fromtimestamp(int(letter.id.partition("-")[0]) / 1000, UTC)


def read_payload(letter: DeadLetter) -> dict[str, Any]:
    """Decode a dead letter: `record`, or the error as `unreadable` with the first bytes as `hex`."""
    kind: type[Prompt | Group] = Prompt if letter.stage in PROMPT_STAGES else Group
    try:
        return {"record": _to_plain(decode(letter.payload, kind))}
    except RecordError as error:
        return {"unreadable": str(error), "bytes": len(letter.payload), "hex": hex_dump(letter.payload[:_HEX_BYTES])}


def hex_dump(data: bytes) -> str:
    """Format bytes, 16 per line: offset, hexadecimal, printable characters."""
    lines = []
    for start in range(0, len(data), 16):
        part = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{start:06x}  {part.hex(' '):<47}  {text}")
    return "\n".join(lines)


def _to_plain(value: Any) -> Any:
    """Return a record as plain values, with token buffers as lists of numbers."""
    if isinstance(value, Row):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        buffers = {
            "prompt_ids": value.prompt.tolist(),
            "token_ids": value.tokens.tolist(),
            "logprobs": value.sampled_logprobs.tolist(),
        }
        return msgspec.to_builtins(fields | buffers, enc_hook=str)
    if isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like:
        plain = {name: _to_plain(getattr(value, name)) for name in value.__struct_fields__}
        tag = value.__struct_config__.tag
        return plain if tag is None else {str(value.__struct_config__.tag_field): tag} | plain
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    return msgspec.to_builtins(value, enc_hook=str)
