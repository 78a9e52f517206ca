"""The ledger: one append-only file over the whole run, a line for each group trained or dropped.

It outlives Redis and pruned checkpoints. A checkpoint holds the ledger's length; resuming cuts what lies behind, so
that the ledger and the weights always tell the same story.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from stream.errors import RunMismatchError
from stream.records import Group


class Line(Struct, frozen=True, omit_defaults=True):
    """One group's end."""

    prompt: str
    end: str
    """`trained`, or `dropped:REASON`."""
    step: int
    """The optimizer step that it was part of, or that came after it was dropped; the first is 1."""
    version: int
    """The policy version that the trainer had then."""
    hash: str
    """Of the group's content (`content_hash`)."""


class Ledger:
    """The file and, in memory, each prompt's end.

    Args:
        path: the file; made where it does not exist.
        length: bytes to keep, from a checkpoint; what lies behind is cut off.

    Raises:
        RunMismatchError: the file is shorter than the checkpoint says, or a line within that length is no line.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        self.path = path
        self.ends: dict[str, str] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        size = path.stat().st_size
        if size < length:
            raise RunMismatchError(f"{path} has {size} bytes, but the checkpoint was made when it had {length}")
        os.truncate(path, length)
        decoder = msgspec.json.Decoder(Line)
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = decoder.decode(text)
                except msgspec.DecodeError as error:
                    raise RunMismatchError(f"{path}, line {number}: {error}") from error
                self.ends[line.prompt] = line.end
        self._file = path.open("ab")

    def append(self, lines: Sequence[Line]) -> None:
        """Write lines; durable only after `sync`."""
        for line in lines:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self.ends[line.prompt] = line.end
        self._file.flush()

    def sync(self) -> int:
        """Make all lines durable. Returns the length in bytes, for the checkpoint."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def tally(self) -> dict[str, int]:
        """Prompts by end: `trained`, `dropped:REASON`."""
        return dict(Counter(self.ends.values()))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def content_hash(group: Group) -> str:
    """A hash of what the trainer sees: ids, tokens, log-probs, rewards, validity; not times, attempts or workers."""
    digest = hashlib.blake2b(group.prompt.id.encode(), digest_size=12)
    for completion in group.completions:
        facts = (completion.index, completion.failure, completion.truncated, completion.parts, completion.reward)
        digest.update(msgspec.msgpack.encode(facts))
        for row in completion.rows:
            for part in (row.prompt_ids, row.token_ids, row.logprobs, msgspec.msgpack.encode((row.sampled, row.spans))):
                digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
