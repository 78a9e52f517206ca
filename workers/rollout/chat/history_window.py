r"""Render a long conversation from its last turns, where the template rewrites history.

Such a template changes a turn when messages follow it (it drops its reasoning, for example), but not again later. So
the end of a conversation is rendered after the prompt, the first turn and the last ones, whatever their number::

    prompt  turn 1  results ... turn 7  results | turn 8  results  turn 9  results  start of turn 10
    settled: as the template wrote it before      the rest: changed by turn 9, or new
    rendered: prompt, turn 1, turn 7              and the rest

A template may look further: count messages, or compare early ones with the last. So this is done only if it agrees with
rendering the whole on sample conversations, whose results hold every text in the template's source, and each real
conversation is compared again at its 4th, 8th, 16th, ... turn. Where the last turns were answered by user messages, the
whole is rendered: many templates find out from these which reasoning to keep.
"""

from collections.abc import Sequence

import structlog

from stream.errors import PenstockError
from stream.records import Message
from workers.rollout.chat.history_check import reasoning_variants
from workers.rollout.chat.renderer import AssistantTurn, ConversationRenderer, Piece
from workers.rollout.chat.sample_conversations import sample_conversations

log = structlog.get_logger()


class HistoryWindow:
    """Renders conversations of one template in pieces, those alone that are not settled where that is possible.

    Args:
        renderer: the model's template with an environment's tools.
    """

    def __init__(self, renderer: ConversationRenderer) -> None:
        self._renderer = renderer
        self._is_exact = False

    def learn(self, *, with_user_replies: bool) -> None:
        """Find out whether the last turns suffice.

        Args:
            with_user_replies: the environment answers some turns with user messages.
        """
        try:
            starts = [*reasoning_variants(self._renderer), ("", "")]
            samples = sample_conversations(self._renderer, starts, user_every=5 * with_user_replies)
            self._is_exact = all(self._agrees(messages, turns) for messages, turns in samples)
        except PenstockError:  # the template refuses a sample
            self._is_exact = False

    def first_turn(self, turns: Sequence[AssistantTurn], settled: int) -> int:
        """Return the first turn that `render` renders; 0: all of them."""
        is_compared = len(turns) & (len(turns) - 1) == 0
        return 0 if is_compared or not self._suffices(turns, settled) else settled - 1

    def render(
        self, messages: Sequence[Message], turns: Sequence[AssistantTurn], settled: Sequence[Piece]
    ) -> tuple[int, list[Piece]]:
        """Render a conversation, and the start of the next turn.

        Args:
            messages: the prompt.
            turns: everything after it.
            settled: the pieces from earlier calls of the turns that `settles` returned then.

        Returns:
            How many settled pieces are still right: all, or none; and the pieces after these.

        Raises:
            DataError: the template refuses the conversation.
        """
        if not self._suffices(turns, len(settled)):
            return 0, self._pieces(messages, turns)
        rest = self._rest(messages, turns, len(settled))
        if self.first_turn(turns, len(settled)):
            return len(settled), rest
        whole = self._pieces(messages, turns)
        if whole == [*settled, *rest]:
            return len(settled), rest
        log.warning("template.window_dropped", turns=len(turns))
        self._is_exact = False
        return 0, whole

    def settles(self, turns: Sequence[AssistantTurn]) -> Sequence[AssistantTurn]:
        """Return the turns whose pieces are settled once another turn follows these."""
        return turns[:-1] if self._is_exact else ()

    def _suffices(self, turns: Sequence[AssistantTurn], settled: int) -> bool:
        return self._is_exact and settled > 1 and _have_only_results(turns[settled - 1 :])

    def _rest(self, messages: Sequence[Message], turns: Sequence[AssistantTurn], settled: int) -> list[Piece]:
        """Render the pieces that are not settled, after the first turn and the one before them."""
        return self._pieces(messages, [turns[0], *turns[settled - 1 :]])[2:]

    def _pieces(self, messages: Sequence[Message], turns: Sequence[AssistantTurn]) -> list[Piece]:
        return list(self._renderer.render_pieces(messages, turns))

    def _agrees(self, messages: Sequence[Message], turns: Sequence[AssistantTurn]) -> bool:
        """Return whether settled pieces and the rest are the whole after each turn of a sample."""
        settled: list[Piece] = []
        for count in range(1, len(turns) + 1):
            now = turns[:count]
            whole = self._pieces(messages, now)
            if [piece.turn for piece in whole] != [*now, None]:
                return False
            has_window = len(settled) > 1 and _have_only_results(now[len(settled) - 1 :])
            if has_window and whole != [*settled, *self._rest(messages, now, len(settled))]:
                return False
            settled = whole[: count - 1]
        return True


def _have_only_results(turns: Sequence[AssistantTurn]) -> bool:
    """Return whether tools alone answered these turns, with text."""
    replies = [reply for turn in turns for reply in turn.replies]
    return all(reply.get("role") == "tool" and type(reply["content"]) is str for reply in replies)
