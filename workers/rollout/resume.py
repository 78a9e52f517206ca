"""Restore the unfinished completions of a group whose worker has died.

Before each turn is sampled, the turns before it are saved. Another worker restores a completion in the first of these
ways that applies:

========== ================================================================= ======================================
way        when                                                              what is lost
========== ================================================================= ======================================
``never``  the environment has `effects = "external"`, and a call was made   the completion, which is invalid
``adopt``  its sandboxes are alive, in a place that survives workers         the sample in progress
``replay`` the environment has `replayable = True`, or runs its own loop     the sample in progress
``anew``   otherwise, or if a replay differs                                 the completion's turns
========== ================================================================= ======================================

An adopted sandbox knows the commands that it has run (`recorded_calls`): calls are made again, and get their results. A
replay resets the environment with the same seed and makes the same calls. In both cases, what the model reads is
compared with what it read before. An own loop is started again, and the turns that it asks for are those that it had.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec
import structlog

from stream.queue.progress_writer import ProgressBatch
from stream.records import Completion, Failure, Message
from stream.validity import RolloutReason
from workers.rollout.engine_client.sampling import SampledTurn
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.turn_journal import RecordedTurn, TurnJournal

log = structlog.get_logger()

_DIGEST_BYTES: Final = 16
_encode = msgspec.msgpack.Encoder().encode


class RestoreMethod(StrEnum):
    """How an unfinished completion of an earlier attempt goes on."""

    ADOPT = "adopt"
    REPLAY = "replay"
    ANEW = "anew"
    NEVER = "never"


class ReplayDiffersError(Exception):
    """The environment did not do again what it did before; the completion has to begin anew."""


class EpisodeJournal:
    """The saved turns of one completion. A conversation asks for them in their order, an own loop by what it asks.

    Args:
        journal: of the group.
        index: of the completion.
        slot: its environment; None if it has none.
        survives: its sandboxes survive this worker.
    """

    def __init__(
        self, journal: TurnJournal, index: int, slot: EnvironmentSlot | None, *, survives: bool = False
    ) -> None:
        self._journal, self._index = journal, index
        self._runs_own_loop = slot is not None and slot.runs_own_loop
        self._can_adopt = survives and slot is not None and slot.uses_sandboxes and not self._runs_own_loop
        self._is_replayable = slot is None or slot.factory.is_replayable or self._runs_own_loop
        self._keeps_tokens = self._is_replayable or self._can_adopt
        self._has_effects = slot is not None and slot.factory.has_effects
        self._name = slot.name if slot is not None else ""
        saved = journal.turns_of(index)
        self._names = list(saved)
        self._saved = {name: turn for name, turn in saved.items() if turn is not None}
        self._unused: list[str] = []
        self._batch: ProgressBatch | None = None
        self.turn = 0
        """The next turn of a conversation, from 0."""
        self._read = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._is_counted = self._is_finished = False
        self.sandboxes: tuple[str, ...] = ()
        """Names of those to adopt."""
        self.method = self._choose()
        """None: there is nothing to restore."""
        if self.method is RestoreMethod.ANEW:
            self.begin_anew("no turn can be read" if self._keeps_tokens else "the environment is not replayable")

    def _choose(self) -> RestoreMethod | None:
        if not self._names:
            return None
        # Of a turn that cannot be read it is unknown whether a call was made.
        may_have_called = self._runs_own_loop or len(self._saved) < len(self._names)
        if self._has_effects and (may_have_called or any(turn.calls for turn in self._saved.values())):
            return RestoreMethod.NEVER
        if self._runs_own_loop or not self._keeps_tokens:
            return RestoreMethod.REPLAY if self._runs_own_loop else RestoreMethod.ANEW
        while self._turn_name() in self._saved:
            self.turn += 1
        in_order = {f"{self._index}/{turn}" for turn in range(self.turn)}
        self.turn, self._unused = 0, [name for name in self._names if name not in in_order]
        self._saved = {name: turn for name, turn in self._saved.items() if name in in_order}
        if in_order:
            self.sandboxes = self._saved[f"{self._index}/{len(in_order) - 1}"].sandboxes
        if self._can_adopt and self.sandboxes:
            return RestoreMethod.ADOPT
        return RestoreMethod.REPLAY if in_order and self._is_replayable else RestoreMethod.ANEW

    def give_up_sandboxes(self) -> None:
        """Restore without the sandboxes of the former worker, which are gone: replay, or begin anew."""
        if self._is_replayable:
            self.method = RestoreMethod.REPLAY
        else:
            self.begin_anew("its sandbox is gone, and the environment is not replayable")

    def is_past(self) -> bool:
        """Return whether a former worker came to the end of what happens now, in the sandboxes that were adopted."""
        return self.method is RestoreMethod.ADOPT and self._turn_name() in self._saved

    def failed(self, completion: Completion) -> Completion:
        """Return the completion as invalid, because a call with effects outside was made, and is never made twice."""
        detail = (
            f"{self._name}: the worker ended in mid-episode, after a call whose effects are external; it is not made "
            "twice"
        )
        completion.failure = Failure(reason=RolloutReason.EFFECTS, detail=detail)
        self._give_up(RestoreMethod.NEVER, detail)
        return completion

    def begin_anew(self, why: str) -> None:
        """Forget the turns, because they cannot be restored."""
        self._give_up(RestoreMethod.ANEW, why)
        self.method = RestoreMethod.ANEW
        self.turn = 0
        self._read = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def _give_up(self, method: RestoreMethod, why: str) -> None:
        log.info("completion.not_restored", method=method, turns=len(self._names), why=why)
        self._journal.save_restoration(self._index, method, self._names)
        self._names, self._saved, self._is_counted = [], {}, True

    def add_read(self, messages: list[Message]) -> None:
        """Note what the model reads from now on: the prompt, then what follows each of its turns."""
        if self._keeps_tokens:
            self._read.update(_encode(messages))

    def next_turn(self) -> SampledTurn | None:
        """Return the next turn of a conversation, which an earlier attempt sampled; None after the last.

        Raises:
            ReplayDiffersError: the model read something else before it.
        """
        recorded = self._saved.get(self._turn_name())
        if recorded is None:
            return None
        if recorded.read != self._read.digest():
            raise ReplayDiffersError(f"what the model reads before turn {self.turn} differs")
        self.turn += 1
        self._journal.count_turn()
        if self._turn_name() not in self._saved:
            self._count_restored()
        return recorded.sampled()

    def check_end(self) -> None:
        """Require that an episode that has ended used all turns.

        Raises:
            ReplayDiffersError: it ended before.
        """
        if self._turn_name() in self._saved:
            raise ReplayDiffersError(f"the episode ended before turn {self.turn}, which was sampled already")

    def save_turn(self, turn: SampledTurn, calls: int, sandboxes: Sequence[str] = ()) -> None:
        """Save a turn of a conversation before its tools run; `wait_saved` waits for it.

        Args:
            turn: that was sampled.
            calls: of the environment that follow.
            sandboxes: names of those that are open, of purpose `agent`.
        """
        name = self._turn_name()
        self.turn += 1
        keeps = self._keeps_tokens
        self._put(name, RecordedTurn.of(turn, self._read.digest(), calls, sandboxes) if keeps else RecordedTurn(calls))

    async def wait_saved(self) -> None:
        """Wait until the turns so far are saved, or given up, so that only the next one is ever sampled again."""
        if self._keeps_tokens and self._batch is not None:
            await self._batch.wait()

    async def may_call(self) -> bool:
        """Return whether the calls of the last turn may be made: they have no effects, or the next worker knows it."""
        return not self._has_effects or self._batch is None or await self._batch.wait()

    def take_answer(self, digest: bytes, number: int) -> SampledTurn | None:
        """Return an own loop's turn that an earlier attempt sampled; None if there is none.

        Args:
            digest: of the conversation.
            number: of answers to the same conversation before this one.
        """
        recorded = self._saved.pop(self._answer_name(digest, number), None)
        if recorded is None:
            return None
        self._journal.count_turn()
        self._count_restored()
        return recorded.sampled()

    async def save_answer(self, digest: bytes, number: int, turn: SampledTurn) -> None:
        """Save an own loop's turn; its answer may be written when this returns."""
        self._put(self._answer_name(digest, number), RecordedTurn.of(turn, b"", 1))
        await self.wait_saved()

    def finish(self, completion: Completion) -> None:
        """Save the finished completion in the place of its turns, if `finish_now` has not."""
        if not self._is_finished:
            self._journal.save_completion(completion, self._names, is_urgent=False)

    async def finish_now(self, completion: Completion) -> None:
        """Save the finished completion, and wait for it: without its sandboxes its turns could not be restored."""
        self._is_finished = True
        await self._journal.save_completion(completion, self._names, is_urgent=True).wait()

    def _put(self, name: str, record: RecordedTurn) -> None:
        self._names.append(name)
        self._batch = self._journal.save_turn(name, record)

    def _count_restored(self) -> None:
        if not self._is_counted:
            self._is_counted = True
            method = self.method or RestoreMethod.REPLAY
            self._journal.save_restoration(self._index, method, self._unused)

    def _turn_name(self) -> str:
        return f"{self._index}/{self.turn}"

    def _answer_name(self, digest: bytes, number: int) -> str:
        return f"{self._index}/{digest.hex()}/{number}"
