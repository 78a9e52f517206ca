"""Dead letters: entries that no worker could complete, with payload, stage and last error."""

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from stream.causes import ErrorCause, parse_cause
from stream.codec import join_record
from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.queue.entry_scan import read_payload

_MAX_NAMED: Final = 3
"""Prompts that a cause names."""
_REFUSALS: Final = {
    -1: "has no entry to put back",
    -2: "is of an evaluation, which has counted it as invalid",
}
"""Why a letter cannot be retried, by the script's answer."""


class DeadLetter(Struct, kw_only=True):
    """One dead letter."""

    id: str
    stage: str
    prompt_id: str
    """Empty for a foreign entry without a prompt id."""
    reason: str
    """`infra`, `data`, or `unreadable`."""
    error: str
    infra_failures: int
    data_failures: int
    ends_prompt: bool
    """True if it is the end of one of the run's prompts; False for a foreign entry or a duplicate."""
    payload: bytes

    @property
    def cause(self) -> ErrorCause | None:
        """The exception in user code, if the error names one."""
        return parse_cause(self.error)


async def list_dead_letters(
    connection: RunConnection, letter_id: str | None = None, count: int = 1000
) -> list[DeadLetter]:
    """Return the dead letters, oldest first; with `letter_id` only that one."""
    low, high = (_check_id(connection, letter_id), letter_id) if letter_id else ("-", "+")
    found: Any = await connection.with_retry(lambda: connection.redis.xrange(connection.key("dead"), low, high, count))
    letters = [_parse_letter(entry_id.decode(), fields) for entry_id, fields in found]
    for letter, (_, fields) in zip(letters, found, strict=True):
        if not letter.payload:
            letter.payload = await read_payload(connection, "dead", letter.id) or b""
        letter.payload = join_record(letter.payload, fields.get(b"f:scores", b""))
    return letters


async def dead_letter_causes(connection: RunConnection) -> dict[str, ErrorCause]:
    """Return the newest cause of the run's dead letters by reason, as `dead:REASON`."""
    newest: dict[str, DeadLetter] = {}
    prompts: dict[str, list[str]] = {}
    for letter in await list_dead_letters(connection):
        newest[letter.reason] = letter
        prompts.setdefault(letter.reason, []).append(letter.prompt_id)
    return {f"dead:{reason}": _explain(letter, prompts[reason]) for reason, letter in newest.items()}


def _explain(letter: DeadLetter, prompts: Sequence[str]) -> ErrorCause:
    """Return the cause of a dead letter, with its message if that says more, and with all prompts that ended so."""
    message, _, _ = letter.error.partition("\n")
    cause = letter.cause or ErrorCause(exception=message)
    exception = cause.exception
    if exception not in message:
        exception = f"{message}: {exception}"
    elif message not in exception:
        exception = message
    more = f" and {len(prompts) - _MAX_NAMED} more" if len(prompts) > _MAX_NAMED else ""
    named = f"prompt{'s' if len(prompts) > 1 else ''} {', '.join(prompts[-_MAX_NAMED:])}{more}"
    source = f"{named}, {cause.source or f'stage {letter.stage}'}"
    return msgspec.structs.replace(cause, exception=exception, source=source)


async def retry_dead_letters(connection: RunConnection, letter_ids: Sequence[str]) -> list[str]:
    """Put dead letters back into their stages, with no failures counted.

    Returns:
        The ids of letters that are not there: another operator has resolved them meanwhile. Each letter is resolved
        once, however many operators resolve it at the same time.

    Raises:
        PenstockError: some cannot be put back; all others have been.
    """
    return await _resolve(connection, letter_ids, "retry")


async def drop_dead_letters(connection: RunConnection, letter_ids: Sequence[str]) -> list[str]:
    """Delete dead letters; prompts that ended with one count as dropped by the operator. Returns as `retry`."""
    return await _resolve(connection, letter_ids, "drop")


async def _resolve(connection: RunConnection, letter_ids: Sequence[str], action: Literal["retry", "drop"]) -> list[str]:
    absent, refused = [], []
    for letter_id in letter_ids:
        answer = await connection.run_script("resolve_dead_letter", _check_id(connection, letter_id), action)
        if answer[0] == 0:
            absent.append(letter_id)
        if answer[0] in _REFUSALS:
            refused.append(f"dead letter {letter_id} {_REFUSALS[answer[0]]}; drop it")
    if refused:
        done = len(letter_ids) - len(absent) - len(refused)
        raise PenstockError("; ".join([f"{done} were retried, not the others", *refused] if done else refused))
    if len(absent) == len(letter_ids) == 1:
        raise _unknown_letter(connection, absent[0])
    return absent


def _check_id(connection: RunConnection, letter_id: str) -> str:
    if not re.fullmatch(r"[0-9]{1,19}-[0-9]{1,19}", letter_id):
        raise _unknown_letter(connection, letter_id)
    return letter_id


def _unknown_letter(connection: RunConnection, letter_id: str) -> PenstockError:
    return PenstockError(f"run {connection.run!r} has no dead letter {letter_id}; `penstock dead` lists them")


def _parse_letter(entry_id: str, fields: dict[bytes, bytes]) -> DeadLetter:
    def text(name: bytes) -> str:
        return fields.get(name, b"").decode(errors="replace")

    return DeadLetter(
        id=entry_id,
        stage=text(b"stage"),
        prompt_id=text(b"prompt"),
        reason=text(b"reason"),
        error=text(b"error"),
        infra_failures=int(text(b"infra") or 0),
        data_failures=int(text(b"data") or 0),
        ends_prompt=text(b"ends_prompt") == "1",
        payload=fields.get(b"f:payload", b""),
    )
