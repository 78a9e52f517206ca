"""`penstock dead`: list, show, retry or drop entries that no worker could finish."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import anyio
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from stream.codec import decode
from stream.connection.keys import PROMPT_STAGES
from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError, RecordError
from stream.operator.dead_letters import DeadLetter, drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.operator.run_status import read_status
from stream.records import Group, Prompt, Row
from stream.trainer.untrained_ends import record_untrained_ends
from workers.run.run_info import find_run, with_run
from workers.runs.export import encode_json
from workers.runs.find import refuse_other_run
from workers.runs.transcript import escape_controls
from workers.terminal.output import print_json

_HEX_BYTES = 512
_NO_PROMPT = "not one of the run's prompts"


class LetterChoice(Struct, frozen=True):
    """Which dead letters a command is about; the default is all."""

    ids: tuple[str, ...] = ()
    """Only these; empty: all that match."""
    reason: str = ""
    """Only those with this reason, or with this text in their error; empty: any."""

    def matches(self, letter: DeadLetter) -> bool:
        """Whether a letter has the reason."""
        return not self.reason or letter.reason == self.reason or self.reason in letter.error


_ALL = LetterChoice()


def list_dead(target: str | None, redis: str, chosen: LetterChoice = _ALL, *, as_json: bool = False) -> None:
    """Print stage, reason and error of each dead letter."""
    letters = _with_connection(target, redis, lambda connection: _select_letters(connection, chosen))
    if as_json:
        print_json([_metadata(letter) for letter in letters])
        return
    console = Console(highlight=False, markup=False, emoji=False)
    for letter in letters:
        failures = letter.infra_failures + letter.data_failures
        head = (
            (letter.id, "bold"),
            f"  {_died_at(letter):%Y-%m-%d %H:%M:%S}  {letter.stage}",
            (f"  {letter.reason}", "yellow"),
            f"  after {failures} failure{'' if failures == 1 else 's'}" if failures else "",
            (f"  {escape_controls(letter.prompt_id) or _NO_PROMPT}", "bright_black"),
        )
        console.print(Text.assemble(*head), soft_wrap=True)
        for line in escape_controls(letter.error).splitlines():
            console.print(f"    {line}", soft_wrap=True)
    if not letters:
        console.print("no dead letters")


def show_dead(target: str | None, redis: str, chosen: LetterChoice = _ALL, *, as_json: bool = False) -> None:
    """Print dead letters with their decoded content."""
    letters = _with_connection(target, redis, lambda connection: _select_letters(connection, chosen))
    contents = [_metadata(letter) | read_payload(letter) for letter in letters]
    if as_json:
        print_json(contents)
        return
    console = Console()
    for content in contents:
        dump = content.pop("hex", "")
        console.print_json(encode_json(content).decode())
        if dump:
            console.print(dump, highlight=False, markup=False)
    if not contents:
        console.print("no dead letters")


def retry_dead(target: str | None, redis: str, chosen: LetterChoice, *, as_json: bool = False) -> None:
    """Put dead letters back into their stages."""
    _change_letters(target, redis, chosen, as_json, retry_dead_letters, "retried")


def drop_dead(target: str | None, redis: str, chosen: LetterChoice, *, as_json: bool = False) -> None:
    """Delete dead letters."""
    _change_letters(target, redis, chosen, as_json, drop_dead_letters, "dropped")


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


def _with_connection(
    target: str | None, redis: str, main: Callable[[RunConnection], Awaitable[list[DeadLetter]]]
) -> list[DeadLetter]:
    return with_run(find_run(target, redis), main)


async def _select_letters(connection: RunConnection, choice: LetterChoice) -> list[DeadLetter]:
    """Return the chosen dead letters, oldest first.

    Raises:
        PenstockError: a named one does not exist, or none has the reason.
    """
    if not choice.ids:
        view = await read_status(connection)
        letters = await list_dead_letters(connection, count=max(1, view.dead))
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


def _change_letters(
    target: str | None,
    redis: str,
    choice: LetterChoice,
    as_json: bool,
    change: Callable[[RunConnection, Sequence[str]], Awaitable[list[str]]],
    past_tense: str,
) -> None:
    location = find_run(target, redis)

    async def main(connection: RunConnection) -> list[DeadLetter]:
        await refuse_other_run(location, connection)
        chosen = await _select_letters(connection, choice)
        try:
            absent = await change(connection, [letter.id for letter in chosen])
        finally:  # a letter that is refused does not undo the others
            if location.folder is not None and await anyio.Path(location.folder / "ledger.jsonl").exists():
                await record_untrained_ends(connection, location.folder / "ledger.jsonl")
        return [letter for letter in chosen if letter.id not in absent]

    chosen = with_run(location, main)
    if as_json:
        print_json({past_tense: [letter.id for letter in chosen]})
    else:
        Console().print(f"{past_tense} {len(chosen)} dead letter{'' if len(chosen) == 1 else 's'}")


def _metadata(letter: DeadLetter) -> dict[str, Any]:
    """Return the fields of a dead letter without its payload."""
    facts = {name: getattr(letter, name) for name in letter.__struct_fields__ if name != "payload"}
    return facts | {"cause": letter.cause, "died_at": _died_at(letter).isoformat(timespec="seconds")}


def _died_at(letter: DeadLetter) -> datetime:
    return datetime.fromtimestamp(int(letter.id.partition("-")[0]) / 1000, UTC)


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
