"""What is saved of a group while it is rolled out: its finished completions, and the turns of the others.

It is on the server until the group ends. If the worker dies, the next one restores the completions from it (`resume`).
"""

import uuid
from array import array
from collections.abc import Sequence
from typing import Self

import structlog
from msgspec import Struct

from stream.codec import decode
from stream.errors import EngineError, RecordError
from stream.queue.lease import Lease
from stream.queue.progress_writer import ProgressBatch, ProgressPart, ProgressWriter
from stream.records import Completion, Span
from workers.rollout.engine_client.sampling import SampledTurn

log = structlog.get_logger()


class RecordedTurn(Struct, frozen=True, array_like=True, omit_defaults=True):
    """A sampled turn in 8 bytes a token, or only the fact that there was one."""

    calls: int = 0
    """Calls of tools in it."""
    read: bytes = b""
    """Digest of the messages that the model had read before it, its own left out; empty for an agent's turn."""
    token_ids: bytes = b""
    """int32, little-endian. Empty: the environment cannot be restored, so that they are of no use."""
    logprobs: bytes = b""
    """float32, little-endian, for each token."""
    is_truncated: bool = False
    """A limit of the engine cut it off."""
    spans: tuple[Span, ...] = ()
    """Policy versions by index range of the tokens."""
    sandboxes: tuple[str, ...] = ()
    """Names of the open sandboxes of purpose `agent`, in the order in which they were opened."""

    @classmethod
    def of(cls, turn: SampledTurn, read: bytes, calls: int, sandboxes: Sequence[str] = ()) -> Self:
        """Pack a turn."""
        ids, logprobs = array("i", turn.token_ids).tobytes(), array("f", turn.logprobs).tobytes()
        return cls(calls, read, ids, logprobs, turn.is_truncated, tuple(turn.spans), tuple(sandboxes))

    def sampled(self) -> SampledTurn:
        """Return the turn.

        Raises:
            EngineError: its parts do not fit each other.
        """
        ids, logprobs = array("i", self.token_ids), array("f", self.logprobs)
        return SampledTurn(ids.tolist(), logprobs.tolist(), "length" if self.is_truncated else "stop", list(self.spans))


class TurnJournal:
    """The saved parts of one group.

    Args:
        writer: of the stage.
        lease: of the prompt.

    Attributes:
        completions: those that earlier attempts finished.
        attempt: names this attempt.
    """

    def __init__(self, writer: ProgressWriter, lease: Lease) -> None:
        self.completions: list[Completion] = []
        self.attempt = uuid.uuid4().hex
        self._writer, self._lease = writer, lease
        self._saved: dict[str, RecordedTurn | None] = {}
        self._turns = 0

    @classmethod
    async def open(cls, writer: ProgressWriter, lease: Lease) -> Self:
        """Return the journal of a prompt, with what earlier attempts saved."""
        journal = cls(writer, lease)
        journal.completions, turns = await writer.stage.load_progress(lease)
        for name, record in turns.items():
            if name[:1].isdigit():
                journal._saved[name.decode(errors="replace")] = journal._read(name, record)
        return journal

    def turns_of(self, index: int) -> dict[str, RecordedTurn | None]:
        """Return the saved turns of a completion by their names; None for one that cannot be read."""
        prefix = f"{index}/"
        return {name: turn for name, turn in self._saved.items() if name.startswith(prefix)}

    def save_turn(self, name: str, turn: RecordedTurn) -> ProgressBatch:
        """Save a turn."""
        self.count_turn()
        return self._writer.put(self._lease, ProgressPart(what="turn", field=name, record=turn, number=self._turns))

    def count_turn(self) -> None:
        """Count a turn that this attempt has, sampled or restored: more than any before are progress."""
        self._turns += 1

    def save_completion(self, completion: Completion, names: list[str], *, is_urgent: bool) -> ProgressBatch:
        """Save a finished completion in the place of its turns, at once or with others.

        Failed completions are saved too: a failure is a result of the group, and repeating only failures would bias it.
        """
        part = ProgressPart(
            what="completion", field=str(completion.index), record=completion, number=completion.turns, names=names
        )
        return self._writer.put(self._lease, part, is_urgent=is_urgent)

    def save_restoration(self, index: int, method: str, unused: list[str]) -> None:
        """Count how a completion was restored, and delete turns that are not used."""
        record = self.attempt.encode()
        self._writer.put(
            self._lease, ProgressPart(what="resumed", field=f"{index}:{method}", record=record, names=unused)
        )

    async def close(self) -> None:
        """Give up what waits to be saved: the group is whole."""
        await self._writer.forget(self._lease)

    def _read(self, name: bytes, record: bytes) -> RecordedTurn | None:
        try:
            turn = decode(record, RecordedTurn)
            turn.sampled()
        except (RecordError, EngineError, ValueError) as error:
            where = {"prompt": self._lease.prompt_id, "turn": name.decode(errors="replace")}
            log.warning("progress.unreadable", **where, why=str(error))
            return None
        return turn
