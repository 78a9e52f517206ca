"""The lines of a ledger file: a record for each prompt that ended, and events of the run.

A prompt ends at the trainer (trained or dropped), as a dead letter, or because the operator drops its dead letter.
These functions work on the file or its bytes alone; `stream.trainer.ledger.Ledger` is the ledger of a running trainer.
"""

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from stream.errors import RunMismatchError
from stream.records import Group

_TRAINED: Final = "trained"
_RETRIED: Final = "retried"
_DROPPED, _DEAD, _ALREADY, _DUPLICATE = "dropped:", "dead:", "already:", "duplicate:"
OPERATOR: Final = "operator"
"""Reason in `Dropped` for a prompt whose dead letter the operator dropped."""


class Trained(Struct, frozen=True):
    """A step trained on the group."""


class Dropped(Struct, frozen=True):
    """The group ended without being trained on."""

    reason: str


LedgerOutcome = Trained | Dropped
"""An outcome that ends the group's prompt; the ledger records it."""


class Dead(Struct, frozen=True):
    """The prompt is a dead letter. Any later record of the prompt replaces this one."""

    reason: str


class Retried(Struct, frozen=True):
    """The operator retried the prompt's dead letter: the prompt is unfinished again."""


LedgerEntry = LedgerOutcome | Dead | Retried
"""What a line of the ledger says about a prompt."""


class AlreadyEnded(Struct, frozen=True):
    """The ledger already has an outcome of the group's prompt: this entry delivered the prompt once more."""

    outcome: LedgerOutcome


class Duplicate(Struct, frozen=True):
    """The trainer holds a newer entry of the same prompt. This one ends without an outcome and uses no capacity."""

    kept_entry: str
    """Id of the newer entry."""


GroupOutcome = LedgerOutcome | AlreadyEnded | Duplicate


def encode_outcome(outcome: GroupOutcome | LedgerEntry) -> str:
    """Return the text form used in the ledger, in the scripts and in the server's counts.

    `trained`, `dropped:REASON`, `dead:REASON`, `retried`, `already:OUTCOME` or `duplicate:ENTRY`.
    """
    match outcome:
        case Trained():
            return _TRAINED
        case Retried():
            return _RETRIED
        case Dead(reason):
            return _DEAD + reason
        case Dropped(reason):
            return _DROPPED + reason
        case AlreadyEnded(recorded):
            return _ALREADY + encode_outcome(recorded)
        case Duplicate(kept_entry):
            return _DUPLICATE + kept_entry


def decode_outcome(text: str) -> LedgerEntry:
    """Parse the text form of a `LedgerEntry` (`encode_outcome`).

    Raises:
        ValueError: the text is not such a form.
    """
    if text == _TRAINED:
        return Trained()
    if text.startswith(_DROPPED):
        return Dropped(text.removeprefix(_DROPPED))
    if text.startswith(_DEAD):
        return Dead(text.removeprefix(_DEAD))
    if text == _RETRIED:
        return Retried()
    raise ValueError(f"{text!r} is not an outcome of a prompt")


class LedgerRecord(Struct, frozen=True):
    """The end of one prompt."""

    prompt: str
    outcome: LedgerEntry
    step: int
    """The optimizer step that contained the group; the first is 1. For a group that was dropped before a step, the next
    one; for an end without a group, the number of steps done."""
    version: int
    """The policy version of the trainer at that time."""
    hash: str
    """Hexadecimal hash of the group's content (`content_hash`); without a group, of prompt and outcome (`end_hash`)."""
    in_step: bool = False
    """Whether the group was in the batch of `step`, which may still have dropped it; False if it ended before."""

    @property
    def has_group(self) -> bool:
        """Whether the prompt ended with a group at the trainer, which may be in the archive."""
        return isinstance(self.outcome, Trained | Dropped) and self.outcome != Dropped(OPERATOR)


def end_hash(prompt: str, entry: LedgerEntry) -> str:
    """Return the `hash` of a record without a group: of prompt and outcome, in hexadecimal."""
    return hashlib.blake2b(msgspec.json.encode((prompt, encode_outcome(entry))), digest_size=12).hexdigest()


def content_hash(group: Group) -> str:
    """Return the `hash` of a record with a group: of what a step depends on, in hexadecimal.

    That is ids, tokens, log-probs, rewards and validity; not times, attempts or workers.
    """
    facts = [
        (
            *(c.index, c.failure, c.truncated, c.parts, c.reward),
            [(row.prompt_ids, row.token_ids, row.sampled_ranges, row.logprobs, row.spans) for row in c.rows],
        )
        for c in group.completions
    ]
    return hashlib.blake2b(msgspec.msgpack.encode((group.prompt.id, facts)), digest_size=12).hexdigest()


class LedgerEvent(Struct, frozen=True):
    """A line about the run, not about a prompt: for example, a setting was changed."""

    event: str
    step: int
    """Optimizer steps done before the event."""
    details: dict[str, Any]
    """JSON values; the keys depend on the event."""


class LedgerLine(Struct, frozen=True):
    """A record and its position in the file."""

    number: int
    """The first is 1."""
    end_offset: int
    """Length of the ledger up to and including this line, in bytes."""
    record: LedgerRecord


class _Line(Struct, omit_defaults=True):
    """The JSON form of a record."""

    prompt: str
    outcome: str
    step: int
    version: int
    hash: str
    in_step: bool = False


_line_decoder = msgspec.json.Decoder(_Line)
_event_decoder = msgspec.json.Decoder(LedgerEvent)


def encode_record(record: LedgerRecord) -> bytes:
    """Return the record's JSON, without a line end."""
    outcome = encode_outcome(record.outcome)
    return msgspec.json.encode(_Line(record.prompt, outcome, record.step, record.version, record.hash, record.in_step))


def decode_record(text: bytes) -> LedgerRecord:
    """Parse one line of the ledger.

    Raises:
        ValueError: the line is not a record.
    """
    line = _line_decoder.decode(text)
    return LedgerRecord(line.prompt, decode_outcome(line.outcome), line.step, line.version, line.hash, line.in_step)


def record_or_none(text: bytes) -> LedgerRecord | None:
    """Parse one line of the ledger; None if it is not a record: an event, or damaged."""
    try:
        return decode_record(text)
    except ValueError:
        return None


def decode_event(text: bytes) -> LedgerEvent | None:
    """Parse one line of the ledger; None if it is not an event."""
    try:
        return _event_decoder.decode(text)
    except ValueError:
        return None


def is_untrained(text: bytes) -> bool:
    """Whether a line is an event, or an end that was decided without the trainer; both are intact if they are read."""
    if not text.endswith(b"\n"):
        return False
    record = record_or_none(text)
    if record is None:
        return decode_event(text) is not None
    return record.hash == end_hash(record.prompt, record.outcome)


def read_events(path: Path) -> list[LedgerEvent]:
    """Read all events of a ledger, in order; none if the file does not exist."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [event for event in map(decode_event, lines) if event is not None]


def read_ledger(path: Path) -> tuple[list[LedgerLine], list[str]]:
    """Read all complete records without changing the file; a file that does not exist has none.

    Returns:
        The records, and a message for each line that is neither a record nor an event.
    """
    lines: list[LedgerLine] = []
    invalid: list[str] = []
    end_offset = 0
    if not path.exists():
        return lines, invalid
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            end_offset += len(text)
            if not text.endswith(b"\n"):
                break  # still being written, or torn when its trainer died
            try:
                lines.append(LedgerLine(number, end_offset, decode_record(text)))
            except ValueError as error:
                if decode_event(text) is None:
                    invalid.append(f"{path}, line {number}: {error}")
    return lines, invalid


class LedgerTail:
    """Reads a ledger that is being written, each record once.

    Args:
        path: of the ledger; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._last = b""
        """The last complete line that was read. It is still in its place unless the ledger was cut, to resume from a
        checkpoint."""

    def exists(self) -> bool:
        """Whether there is a ledger."""
        return self._path.exists()

    def read_new(self) -> tuple[list[LedgerRecord], bool]:
        """Read the records that were completed since the last call.

        Returns:
            The records, and whether the ledger was cut or removed since the last call: if so, the records are those of
            the whole file, and earlier ones no longer count.
        """
        if not self.exists():
            is_cut, self._read, self._last = bool(self._read), 0, b""
            return [], is_cut
        with self._path.open("rb") as file:
            file.seek(self._read - len(self._last))
            is_cut = file.read(len(self._last)) != self._last
            if is_cut:
                file.seek(0)
                self._read, self._last = 0, b""
            text = file.read()
        lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
        self._read += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        return [record for record in map(record_or_none, lines) if record is not None], is_cut


class LedgerContents(Struct):
    """What a ledger says about prompts."""

    outcomes: dict[str, LedgerOutcome]
    """How prompts were trained or dropped, by prompt id."""
    dead: dict[str, Dead]
    """Dead letters that were neither retried nor dropped since, by prompt id."""

    def ends(self) -> dict[str, str]:
        """Return how each prompt ended, by prompt id, in the text form of `encode_outcome`."""
        return {prompt: encode_outcome(end) for prompt, end in (*self.dead.items(), *self.outcomes.items())}


def read_contents(path: Path, length: int | None = None) -> LedgerContents:
    """Read the first `length` bytes of a ledger, or, without a length, all complete lines. Changes nothing.

    Raises:
        RunMismatchError: the file is shorter than `length`, or a line is neither a record nor an event.
    """
    content = path.read_bytes() if path.exists() else b""
    if length is None:
        length = content.rfind(b"\n") + 1
    if len(content) < length:
        raise RunMismatchError(f"{path} has {len(content)} bytes, but the checkpoint was made when it had {length}")
    return parse_contents(path, content, length)


def parse_contents(path: Path, content: bytes, length: int) -> LedgerContents:
    """Return what the first `length` bytes of a ledger say.

    Raises:
        RunMismatchError: a line is neither a record nor an event, or `length` is not at the end of a line.
    """
    contents = LedgerContents({}, {})
    for number, text in enumerate(content[:length].splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):
            raise RunMismatchError(
                f"{path}, line {number}: the ledger's length in the checkpoint ends within this line"
            )
        try:
            apply_record(decode_record(text), contents.outcomes, contents.dead)
        except ValueError as error:
            if decode_event(text) is None:
                raise RunMismatchError(f"{path}, line {number}: {error}") from error
    return contents


def apply_record(record: LedgerRecord, outcomes: dict[str, LedgerOutcome], dead: dict[str, Dead]) -> None:
    """Update `outcomes` and `dead` with a record: what is trained or dropped stays so, a dead letter may be retried."""
    match record.outcome:
        case Trained() | Dropped() as outcome:
            outcomes[record.prompt] = outcome
            dead.pop(record.prompt, None)
        case Dead() as outcome:
            if record.prompt not in outcomes:
                dead[record.prompt] = outcome
        case Retried():
            dead.pop(record.prompt, None)


def describe_first_error(path: Path, content: bytes) -> str:
    """Return the place of the first line that is neither a record nor an event, as `FILE, line N`; empty if none is."""
    for number, text in enumerate(content.splitlines(keepends=True), 1):
        if not text.endswith(b"\n") or (record_or_none(text) is None and decode_event(text) is None):
            return f"{path}, line {number}"
    return ""


REBUILT: Final = "ledger_rebuilt"
"""Name of the event after the lines of a ledger that was rebuilt for a checkpoint (`stream.trainer.ledger_rebuild`)."""


def find_rebuilt(content: bytes, length: int, digest: str) -> tuple[int, str]:
    """Return length and digest of the part of a ledger that belongs to a checkpoint.

    These are the checkpoint's own, unless the ledger was rebuilt for it: then the part reaches to the event that says
    so.

    Args:
        content: the bytes of the ledger.
        length: bytes of the ledger when the checkpoint was made, as stored in the checkpoint.
        digest: `digest_of` these bytes, as stored in the checkpoint.
    """
    end = 0
    for text in content.splitlines(keepends=True):
        event = decode_event(text) if f'"{REBUILT}"'.encode() in text else None
        if event is not None and event.event == REBUILT:
            made_for = event.details.get("checkpoint_bytes"), event.details.get("checkpoint_digest")
            if made_for == (length, digest) and event.details.get("digest") == digest_of(content[:end]):
                return end + len(text), digest_of(content[: end + len(text)])
        end += len(text)
    return length, digest


def digest_of(content: bytes) -> str:
    """Return the digest of a part of a ledger, in hexadecimal, as a checkpoint stores it."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
