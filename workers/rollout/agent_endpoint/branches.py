"""The turns of one episode as a tree: which of them a request continues, and which row its tokens join.

::

    root ── a ── b ── c      one row: the program sent its history back unchanged
            └── d ── e       a row of its own: its prompt is root and a, so no sampled token is in two rows

A request names no turn. It continues the deepest one whose conversation it begins with. Tokens decide the row: it grows
if the new context starts with its tokens, and if nothing else has grown it since.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from stream.records import Message, Row
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.renderer import AssistantTurn
from workers.rollout.engine_client.sampling import SampledTurn
from workers.rollout.rows import RowBuilder
from workers.rollout.token_ids import TokenIds

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


@dataclass(eq=False, slots=True)
class Turn:
    """One sampled turn."""

    parent: "Turn | None"
    added: list[Message]
    """What the program sent after the parent's answer; the whole prompt of a root."""
    message: Message
    """The answer."""
    spoken: AssistantTurn
    chat: ChatTokenizer
    row: RowBuilder
    end: int
    """Length of the row's context after the answer."""
    used: int
    """Tokens after the root's prompt: sampled ones, and what the program sent between."""

    @property
    def ended_with_eos(self) -> bool:
        """The turn ended with the template's own end-of-turn token."""
        return list(self.spoken.token_ids[-1:]) == [self.chat.end_of_turn_id]

    @property
    def is_tip(self) -> bool:
        """Nothing was appended to the row since."""
        return len(self.row.context()) == self.end

    @property
    def root(self) -> "Turn":
        """The first turn of the conversation."""
        return self.path()[0]

    def path(self) -> "list[Turn]":
        """Return the turns from the root to this one."""
        path, turn = [self], self.parent
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    def context(self) -> TokenIds:
        """Return a copy of the tokens up to the end of the answer."""
        ids = self.row.context()
        return ids.copy() if self.is_tip else TokenIds(ids[: self.end])

    def conversation(self, added: list[Message]) -> tuple[list[Message], list[AssistantTurn]]:
        """Return the prompt and the turns with what followed each; `added` follows this one."""
        path = self.path()
        following = [*(turn.added for turn in path[1:]), added]
        turns = [replace(turn.spoken, replies=replies) for turn, replies in zip(path, following, strict=True)]
        return path[0].added, turns


@dataclass(slots=True)
class Place:
    """Where a request stands in the tree, and the tokens that the model is to see."""

    parent: Turn | None
    added: list[Message]
    chat: ChatTokenizer
    digest: bytes
    """Of the conversation and its tools."""
    context: TokenIds
    new_count: int
    """Tokens of the context that the conversation did not have before; 0 for a root."""
    continues: bool = False
    """The context starts with the tokens of the parent."""

    @property
    def used(self) -> int:
        """Tokens after the root's prompt."""
        return (self.parent.used if self.parent else 0) + self.new_count

    @property
    def depth(self) -> int:
        """Turns before this one."""
        return len(self.parent.path()) if self.parent else 0


@dataclass(slots=True)
class Branches:
    """The tree of one episode.

    Attributes:
        rows: in the order of their first turns.
        first: the root of the first conversation; None before a turn.
    """

    rows: list[RowBuilder] = field(default_factory=list)
    first: Turn | None = None
    _turns: dict[bytes, list[Turn]] = field(default_factory=dict)

    def find(self, digests: Sequence[bytes]) -> tuple[Turn, int] | None:
        """Return the turn that a request continues, and how many messages of the request it covers.

        Args:
            digests: of the request's conversation after each of its messages.
        """
        for count in range(len(digests) - 1, 0, -1):  # a request ends with something new
            if found := self._turns.get(digests[count - 1]):
                return next((turn for turn in reversed(found) if turn.is_tip), found[-1]), count
        return None

    def add(self, place: Place, sampled: SampledTurn, spoken: AssistantTurn, message: Message) -> Turn:
        """Record a turn; its row grows, or starts with the context as its prompt."""
        parent, chat = place.parent, place.chat
        if parent is not None and place.continues and parent.is_tip:
            row = parent.row
            row.append_context(place.context[parent.end :])
        else:
            row = RowBuilder(place.context)
            self.rows.append(row)
        row.append_sample(sampled)
        used = place.used + len(sampled.token_ids)
        turn = Turn(parent, place.added, message, spoken, chat, row, len(row.context()), used)
        self.first = self.first or turn
        self._turns.setdefault(next_digest(place.digest, message), []).append(turn)
        return turn

    def sampled_rows(self) -> list[Row]:
        """Return the rows."""
        return [row for builder in self.rows if (row := builder.row()) is not None]

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return set().union(*(row.versions() for row in self.rows))

    def token_count(self) -> int:
        """Return the number of tokens after the prompts of all rows."""
        return sum(len(row) for row in self.rows)


def digests_of(messages: Sequence[Message], start: bytes) -> list[bytes]:
    """Return the digest of a conversation after each of its messages; `start` tells apart what is before them.

    Raises:
        ValueError, OverflowError, RecursionError: a message holds what a record cannot hold.
    """
    found, last = [], start
    for message in messages:
        last = next_digest(last, message)
        found.append(last)
    return found


def next_digest(before: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message."""
    return hashlib.blake2b(before + _encode(message), digest_size=16).digest()
