"""Sampled turns of an agent's episodes, kept on the server until their group ends, in case the worker dies.

The next worker starts each episode anew. Its program asks the same as before, as long as it is answered the same: each
answer is the recorded one, token for token, with the policy version that sampled it. Where the program asks something
else, the model samples again.
"""

import msgspec
import structlog

from stream.errors import EngineError
from stream.queue.lease import Lease
from stream.queue.stage import Stage
from workers.rollout.engine_client.sampling import SampledTurn

log = structlog.get_logger()

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(SampledTurn)


class TurnJournal:
    """The turns of one attempt at a prompt.

    Args:
        stage: on which they are saved.
        lease: of the prompt.
        saved: turns of earlier attempts, by name.
    """

    def __init__(self, stage: Stage, lease: Lease, saved: dict[bytes, bytes]) -> None:
        self._stage, self._lease = stage, lease
        self._saved = saved
        self._before = len(saved)
        self._turns = 0

    @classmethod
    async def open(cls, stage: Stage, lease: Lease) -> "TurnJournal":
        """Return the journal of a prompt, with what earlier attempts saved."""
        return cls(stage, lease, await stage.load_turns(lease))

    def take(self, index: int, digest: bytes, number: int) -> SampledTurn | None:
        """Return a turn that an earlier attempt sampled; None if there is none that can be read.

        Args:
            index: of the completion.
            digest: of the conversation.
            number: of answers to the same conversation before this one.
        """
        payload = self._saved.pop(_name(index, digest, number).encode(), None)
        if payload is None:
            return None
        try:
            turn = _decoder.decode(payload)
        except (ValueError, EngineError) as error:
            log.warning("journal.unreadable", prompt=self._lease.prompt_id, completion=index, why=str(error))
            return None
        self._turns += 1
        return turn

    async def save(self, index: int, digest: bytes, number: int, turn: SampledTurn) -> None:
        """Save a turn; its answer may be written when this returns."""
        self._turns += 1
        await self._stage.save_turn(self._lease, _name(index, digest, number), _encode(turn), self._turns)

    def report(self) -> None:
        """Log how many turns of earlier attempts were answered again, and how many nobody asked for any more."""
        if self._before:
            lost = len(self._saved)
            log.info("journal.replayed", prompt=self._lease.prompt_id, turns=self._before - lost, worker_lost=lost)


def _name(index: int, digest: bytes, number: int) -> str:
    return f"{index}/{digest.hex()}/{number}"
