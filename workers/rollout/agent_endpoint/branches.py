"""The turns of one episode as a tree: which of them a request continues, and which row its tokens join.

::

    root ── a ── b ── c      one branch, one row: the program sent its history back unchanged
            └── d ── e       a branch and a row of its own: its prompt is root and a, so no sampled token is in two rows

A request names no turn. It continues the deepest one whose conversation it begins with. Tokens decide the row: it grows
if the new context starts with its tokens, and if nothing else has grown it since.

A program may also send its history back with changes: without old reasoning, with a shorter result. Such a request has
the branch's opening and the same sequence of roles. It stays in the branch, in a new row.
"""

import hashlib
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from stream.records import Message
from stream.validity import TruncationReason
from workers.rollout.agent_endpoint.neutral import RequestSource
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
    branch: "BranchBuilder"
    number: int
    """In the branch, from 1."""
    order: int
    """In the episode, from 1."""
    position: int
    """Of the answer, in `Completion.messages`."""
    row: RowBuilder
    end: int
    """Length of the row's context after the answer."""
    asked: bytes
    """Digest of the conversation that it answers."""
    is_continued: bool = False
    """A later turn follows it."""

    @property
    def ended_with_eos(self) -> bool:
        """The turn ended with the template's own end-of-turn token."""
        return list(self.spoken.token_ids[-1:]) == [self.chat.end_of_turn_id]

    @property
    def is_tip(self) -> bool:
        """Nothing was appended to the row since."""
        return len(self.row.context()) == self.end

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


@dataclass(eq=False, slots=True)
class BranchBuilder:
    """A branch under construction.

    Attributes:
        source: what its first request said about itself.
        has_tools: its first request had tools.
        opening: digest of its prompt up to the first user message.
        parent: the branch from which it forked; None for a root.
        after_turn: how many turns of the parent it starts with; None for a root.
        turns: in their order.
        rows: in the order of their first turns.
        rewritten: who rewrote the history before each row after the first: `template` or `program`.
        roles: of the messages of the conversation so far.
        used: tokens after its first prompt: sampled ones, and what the program sent between.
        limited: the limit that had the last word.
    """

    source: RequestSource
    has_tools: bool
    opening: bytes
    parent: "BranchBuilder | None" = None
    after_turn: int | None = None
    turns: list[Turn] = field(default_factory=list)
    rows: list[RowBuilder] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    roles: tuple[str, ...] = ()
    used: int = 0
    limited: TruncationReason | None = None

    @property
    def tip(self) -> Turn:
        """The last turn."""
        return self.turns[-1]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a request, as the tree looks them up."""

    messages: list[Message]
    roles: tuple[str, ...]
    digests: list[bytes]
    """After each message."""
    opening: bytes
    """Up to the first user message."""
    source: RequestSource
    has_tools: bool


@dataclass(slots=True)
class Place:
    """Where a request stands in the tree, and the tokens that the model is to see."""

    conversation: Conversation
    chat: ChatTokenizer
    parent: Turn | None
    """The deepest turn whose conversation it begins with."""
    branch: BranchBuilder | None
    """The branch that it continues; None if it starts one."""
    added: list[Message]
    """What follows the parent's answer."""
    context: TokenIds
    continues: bool = False
    """The context starts with the tokens of the parent."""
    new_count: int = 0
    """Tokens of the context that the branch did not have before; 0 if the request starts one."""
    tip: Turn | None = None
    """The branch's last turn."""
    known: int = 0
    """How many messages of the conversation the branch had before."""

    @property
    def digest(self) -> bytes:
        """Of the conversation and its tools."""
        return self.conversation.digests[-1]

    @property
    def used(self) -> int:
        """Tokens of the branch after its first prompt."""
        return self.branch.used + self.new_count if self.branch else 0

    @property
    def depth(self) -> int:
        """Turns of the branch before this one."""
        return len(self.branch.turns) if self.branch else 0

    @property
    def said(self) -> list[Message]:
        """What the program says that the branch did not have before."""
        return self.added if self.branch is None else self.conversation.messages[self.known :]


@dataclass(slots=True)
class Branches:
    """The tree of one episode.

    Attributes:
        branches: in the order of their first turns.
        turn_count: turns of all of them.
    """

    branches: list[BranchBuilder] = field(default_factory=list)
    turn_count: int = 0
    _turns: dict[bytes, list[Turn]] = field(default_factory=dict)
    _openings: dict[bytes, list[BranchBuilder]] = field(default_factory=dict)

    def find(self, conversation: Conversation) -> tuple[Turn | None, int, BranchBuilder | None]:
        """Return the turn that a request continues, how many of its messages that covers, and the branch it continues.

        A request that continues a turn which is no longer the last of its branch starts a branch.
        """
        turn, count = None, 0
        for covered in range(len(conversation.digests) - 1, 0, -1):  # a request ends with something new
            if found := self._turns.get(conversation.digests[covered - 1]):
                turn, count = next((each for each in reversed(found) if each.is_tip), found[-1]), covered
                break
        if turn is not None and turn is turn.branch.tip and _is_same(turn.branch.source, conversation.source):
            return turn, count, turn.branch
        has_unknown_answer = "assistant" in conversation.roles[count:]
        return turn, count, self._find_rewritten(conversation, turn) if has_unknown_answer else None

    def _find_rewritten(self, conversation: Conversation, turn: Turn | None) -> BranchBuilder | None:
        """Return the branch whose history, after a turn that is unchanged, a request holds in other words."""
        roles = conversation.roles
        found = [
            branch
            for branch in self._openings.get(conversation.opening, ())
            if len(branch.roles) < len(roles)
            and roles[: len(branch.roles)] == branch.roles
            and _is_same(branch.source, conversation.source)
            and (turn is None or turn in branch.tip.path())
        ]
        return max(found, key=lambda branch: len(branch.roles), default=None)

    def add(self, place: Place, sampled: SampledTurn, spoken: AssistantTurn, message: Message, position: int) -> Turn:
        """Record a turn; its row grows, or starts with the context as its prompt.

        Args:
            place: where it belongs.
            sampled: its tokens.
            spoken: the same for the chat template.
            message: the answer.
            position: of the answer in the completion's messages.
        """
        parent, branch = place.parent, place.branch
        is_new = branch is None or branch.tip is not place.tip  # another request was faster
        if branch is None or is_new:
            branch = self._start(place)
        else:
            branch.used += place.new_count
            branch.tip.is_continued = True
        if parent is not None:
            parent.is_continued = True
        if parent is not None and not is_new and parent is branch.tip and place.continues and parent.is_tip:
            row = parent.row
            row.append_context(place.context[parent.end :])
        else:
            row = RowBuilder(place.context)
            branch.rows.append(row)
            if not is_new:
                branch.rewritten.append("template" if parent is branch.tip else "program")
        row.append_sample(sampled)
        self.turn_count += 1
        turn = Turn(
            parent=parent,
            added=place.added,
            message=message,
            spoken=spoken,
            chat=place.chat,
            branch=branch,
            number=len(branch.turns) + 1,
            order=self.turn_count,
            position=position,
            row=row,
            end=len(row.context()),
            asked=place.digest,
        )
        branch.turns.append(turn)
        branch.roles = (*place.conversation.roles, "assistant")
        branch.used += len(sampled.token_ids)
        branch.limited = None
        self._turns.setdefault(next_digest(place.digest, message), []).append(turn)
        return turn

    def _start(self, place: Place) -> BranchBuilder:
        conversation, parent = place.conversation, place.parent
        branch = BranchBuilder(conversation.source, conversation.has_tools, conversation.opening)
        if parent is not None:
            branch.parent, branch.after_turn = parent.branch, parent.number
        self.branches.append(branch)
        self._openings.setdefault(branch.opening, []).append(branch)
        return branch

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return set().union(*(row.versions() for branch in self.branches for row in branch.rows))

    def row_count(self) -> int:
        """Return the number of rows."""
        return sum(len(branch.rows) for branch in self.branches)

    def token_count(self) -> int:
        """Return the number of tokens after the prompts of all rows."""
        return sum(len(row) for branch in self.branches for row in branch.rows)


def _is_same(known: RequestSource, asking: RequestSource) -> bool:
    """Whether a request may be of a known conversation: it has the same name and the same role, or says nothing."""
    return asking.name in {"", known.name} and asking.role in {None, known.role}


def conversation_of(messages: list[Message], start: bytes, source: RequestSource, *, has_tools: bool) -> Conversation:
    """Return a request as the tree looks it up.

    Args:
        messages: of the request.
        start: digest of what is before them.
        source: who asks.
        has_tools: the request has tools.

    Raises:
        ValueError, OverflowError, RecursionError: a message holds what a record cannot hold.
    """
    digests, last, opening = [], start, b""
    for message in messages:
        last = next_digest(last, message)
        digests.append(last)
        if not opening and message["role"] == "user":
            opening = last
    roles = tuple(str(message["role"]) for message in messages)
    return Conversation(messages, roles, digests, opening or last, source, has_tools)


def next_digest(before: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message."""
    return hashlib.blake2b(before + _encode(message), digest_size=16).digest()
