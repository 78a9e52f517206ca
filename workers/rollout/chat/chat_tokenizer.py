r"""Conversations as token ids: the prompt once, and after each turn only what is new.

Sampled ids are never made again from text. After a turn the chat tokenizer appends what the template writes *between*
the assistant's end-of-turn token and the next place to sample::

    <|im_start|>user ... <|im_end|>\n<|im_start|>assistant\n          prompt_ids(messages)
    <tool_call>{...}</tool_call><|im_end|>                           sampled by the engine, kept unchanged
    \n<|im_start|>user\n<tool_response>42</tool_response>...           continuation_ids([tool message], True)

`check_history` finds out at start whether that equals rendering the whole conversation, and `continues` whether it does
for a real one, too. If it does not, because the template rewrites earlier turns, `conversation_ids` renders the whole
before each turn; turns that the template leaves unchanged still keep their sampled ids.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgspec

from envs.messages import content_text
from stream.errors import DataError, PenstockError
from stream.records import Message
from workers.rollout.chat.history_check import ConversationCheck, HistoryCheck, check_history
from workers.rollout.chat.renderer import AssistantTurn, ConversationRenderer, Piece
from workers.rollout.chat.template import ChatTemplate, read_json
from workers.rollout.chat.text_encoder import TextEncoder
from workers.rollout.token_ids import TokenIds
from workers.rollout.tool_formats.parsing import open_reasoning

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")

_LONG_TEXT_CHARACTERS = 20_000
"""Texts of this length and more are rendered and tokenized in a thread."""
_LONG_TURN_TOKENS = 10_000
"""Turns of this length and more are decoded in a thread."""
_CACHED_PROMPTS = 32
"""A group's completions start at about the same time, mostly with the same prompt."""
_REASONING_WINDOW = 40
"""Tokens at a prompt's end in which a template may open a reasoning block."""
_SAMPLE_PROMPT: list[Message] = [{"role": "user", "content": "u"}]


class ChatTokenizer:
    """One model's tokenizer and chat template, with one environment's tools. Threads may share it.

    Attributes:
        renderer: renders conversations as text.
        stop_token_ids: the tokens that end a turn, ascending.
        end_of_turn_id: the one that the template writes after an assistant's text; None if it writes none, which
            suffices for single-turn episodes.
        rewrites_history: `check_history` found that the template rewrites earlier turns, so each turn starts with
            `conversation_ids`.
        shows_tools: `with_tools` gives the template the tools; if not, the model is to know them.
    """

    def __init__(
        self, tokenizer: "Tokenizer", template: ChatTemplate, tools: list[dict[str, Any]] | None, eos_ids: set[int]
    ) -> None:
        self.renderer = ConversationRenderer(template, tools)
        self.rewrites_history = False
        self.shows_tools = True
        self._conversations = ConversationCheck(self.renderer, HistoryCheck(False, ""), ("tool", "user"))
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        self.end_of_turn_id = self._find_end_of_turn()
        end_of_turn = set() if self.end_of_turn_id is None else {self.end_of_turn_id}
        self.stop_token_ids = tuple(sorted(eos_ids | end_of_turn))
        self._tool_characters = len(msgspec.json.encode(tools)) if tools else 0
        self._cached_prompt = lru_cache(maxsize=_CACHED_PROMPTS)(
            lambda key: TokenIds(self.prompt_ids(msgspec.msgpack.decode(key)))
        )
        self._long_prompts = anyio.Lock()
        with suppress(DataError):
            self._encoder.find_cuts(self.renderer.render_prompt(_SAMPLE_PROMPT) + self.renderer.after_answer())

    @classmethod
    def load(
        cls, model_path: Path, template_args: dict[str, Any], tools: list[dict[str, Any]] | None
    ) -> "ChatTokenizer":
        """Read tokenizer, template and stop tokens from a folder in Hugging Face form. Loads no torch.

        Raises:
            PenstockError: the folder, its tokenizer or its chat template is missing.
        """
        from tokenizers import Tokenizer

        if not model_path.is_dir():
            raise PenstockError(f"{model_path}: no such folder; model.path names a folder in Hugging Face form")
        file = model_path / "tokenizer.json"
        if not file.is_file():
            raise PenstockError(
                f"{model_path}: no tokenizer.json; save the model's *fast* tokenizer next to its weights"
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise PenstockError(f"{file}: not a tokenizer: {error}") from error
        tokenizer.no_truncation()  # a folder may enable both, which would silently cut prompts short
        tokenizer.no_padding()
        template = ChatTemplate.load(model_path, template_args, with_tools=bool(tools))
        return cls(tokenizer, template, tools, _eos_ids(model_path, tokenizer, template))

    def with_tools(self, tools: list[dict[str, Any]] | None) -> "ChatTokenizer":
        """Return the same model's chat tokenizer with other tools."""
        shown = tools if self.shows_tools else None
        return ChatTokenizer(self._tokenizer, self.renderer.template, shown, set(self.stop_token_ids))

    def check_history(self, *, with_tools: bool = True, with_user_replies: bool = False) -> HistoryCheck:
        """Find out whether the template rewrites earlier turns, and encode conversations accordingly from now on.

        Args:
            with_tools: conversations have tool calls.
            with_user_replies: the environment answers turns with user messages.

        Raises:
            DataError: the template refuses tool messages.
            PenstockError: it leaves them out.
        """
        check = check_history(self.renderer, with_tools=with_tools, with_user_replies=with_user_replies)
        self.rewrites_history = check.rewrites_history
        if not check.rewrites_history:
            roles = ["tool"] * with_tools + ["user"] * with_user_replies
            self._conversations = ConversationCheck(self.renderer, check, roles)
        return check

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Encode the conversation so far and the start of an assistant's turn.

        Raises:
            DataError: the template refuses these messages.
        """
        return self._encoder.encode_segments(self.renderer.render_prompt(messages))

    def turn_ids(self, text: str) -> list[int]:
        """Encode a turn that no model sampled, with the token that ends it."""
        return self._encoder.encode(text) + list(
            self.stop_token_ids[:1] if self.end_of_turn_id is None else [self.end_of_turn_id]
        )

    def continuation_ids(self, new_messages: Sequence[Message], ended_with_eos: bool) -> list[int]:
        """Encode what is between two assistant turns: the new messages and the start of the next turn.

        Args:
            new_messages: all messages between the two turns: tool messages, or what `respond` returned.
            ended_with_eos: the turn's last sampled token is `end_of_turn_id`; otherwise the result starts with it.

        Raises:
            PenstockError: the template cannot continue after an assistant's turn.
        """
        ids = self._encoder.encode_segments(self.renderer.render_continuation(new_messages))
        if not ids or ids[0] != self.end_of_turn_id:
            raise PenstockError(
                f"{self.renderer.template.folder}: its tokenizer splits the end of turn {self.renderer.end_of_turn!r}"
            )
        return ids[1:] if ended_with_eos else ids

    def conversation_ids(self, messages: Sequence[Message], turns: Sequence[AssistantTurn]) -> tuple[TokenIds, int]:
        """Encode the whole conversation as the template writes it now, and the start of the next turn.

        Turns that the template leaves unchanged keep their sampled ids.

        Args:
            messages: the prompt.
            turns: everything after it.

        Returns:
            The ids, and how many of them follow the last turn.

        Raises:
            DataError: the template refuses the conversation.
        """
        pieces = list(self.renderer.render_pieces(messages, turns))
        ids, last = TokenIds(), 0
        for piece, following in zip(pieces, [piece.text for piece in pieces[1:]] + [""], strict=True):
            text = self._text_ids(piece.text, ids)
            ids.extend(text)
            ids.extend(self._turn_ids(piece, following))
            last = len(text)
        return ids, last

    def _text_ids(self, text: str, before: TokenIds) -> list[int]:
        """Encode a text of the template, without the end of turn if the ids before it have one."""
        if before and not self._starts_with_end(text):
            return self._encoder.encode_after_text(text)
        ids = self._encoder.encode_segments(text)
        return ids[1:] if ids[:1] == before[-1:] == [self.end_of_turn_id] else ids

    def _turn_ids(self, piece: Piece, following: str) -> Sequence[int]:
        """Return the ids of a piece's turn.

        It keeps its stop token if the template's own end of turn follows directly. Otherwise the text that follows ends
        the turn: Llama 2's template writes a blank and `</s>`.
        """
        if piece.turn is None:
            return ()
        ids = self._ids_from(piece.turn, piece.cut)
        has_two_ends = ids and ids[-1] in self.stop_token_ids and not self._starts_with_end(following)
        return ids[:-1] if has_two_ends else ids

    def _starts_with_end(self, text: str) -> bool:
        """Return whether a text starts with the special token that ends a turn."""
        return bool(self.renderer.end_of_turn) and text.startswith(self.renderer.end_of_turn)

    def open_reasoning(self, context: Sequence[int]) -> str:
        """Return the start of a reasoning block that these ids end with; what is sampled next is then reasoning."""
        return open_reasoning(self._decode_all(context[-_REASONING_WINDOW:]))

    async def encode_prompt(self, messages: Sequence[Message]) -> TokenIds:
        """Run `prompt_ids`, in a thread if the prompt is long; once for the completions of a group that share it."""
        if self._tool_characters + _characters(messages) < _LONG_TEXT_CHARACTERS:
            return self._prompt(messages)
        async with self._long_prompts:  # a group's other completions wait for the first
            return await _in_thread(partial(self._prompt, messages))

    def _prompt(self, messages: Sequence[Message]) -> TokenIds:
        try:
            key = msgspec.msgpack.encode(messages)
        except (TypeError, ValueError, OverflowError):  # images and the like
            return TokenIds(self.prompt_ids(messages))
        return self._cached_prompt(key).copy()

    async def encode_conversation(
        self, messages: Sequence[Message], turns: Sequence[AssistantTurn]
    ) -> tuple[TokenIds, int]:
        """Run `conversation_ids`, in a thread if the conversation is long."""
        work = partial(self.conversation_ids, messages, turns)
        size = self._tool_characters + _characters(messages)
        size += sum(len(turn.text) + _characters(turn.replies) for turn in turns)
        return work() if size < _LONG_TEXT_CHARACTERS else await _in_thread(work)

    async def continues(self, messages: Sequence[Message], turns: Sequence[AssistantTurn]) -> bool:
        """Return whether `encode_continuation` of the last replies continues this conversation.

        Args:
            messages: the prompt.
            turns: everything after it.
        """
        if self.rewrites_history:
            return False
        if len(turns) > 1 and not self._conversations.is_due(turns):
            return True
        check = partial(self._conversations.continues, messages, turns)
        size = self._tool_characters + _characters(messages) + sum(_characters(turn.replies) for turn in turns)
        return check() if size < _LONG_TEXT_CHARACTERS else await _in_thread(check)

    async def decode_turn(self, ids: Sequence[int]) -> str:
        """Run `decode`, in a thread if the turn is long."""
        return self.decode(ids) if len(ids) < _LONG_TURN_TOKENS else await _in_thread(partial(self.decode, ids))

    async def encode_continuation(self, new_messages: Sequence[Message], ended_with_eos: bool) -> Sequence[int]:
        """Run `continuation_ids`, in a thread if the messages are long."""
        if _characters(new_messages) < _LONG_TEXT_CHARACTERS:
            return self.continuation_ids(new_messages, ended_with_eos)
        return await _in_thread(lambda: TokenIds(self.continuation_ids(new_messages, ended_with_eos)))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode a turn: special tokens stay, except for one stop token at the end."""
        end = len(ids) - 1 if ids and ids[-1] in self.stop_token_ids else len(ids)
        return self._decode_all(ids[:end])

    def text_stream(self) -> Callable[[int], str]:
        """Return a function that takes the tokens of a turn one by one and returns the text that each completes."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return lambda token: stream.step(self._tokenizer, token) or ""

    def token_text(self, token: int) -> str:
        """Return the text of one token; a part of a character becomes the replacement character."""
        return self._decode_all([token])

    def _decode_all(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _ids_from(self, turn: AssistantTurn, cut: int) -> list[int]:
        """Return the turn's ids from that character on: as sampled, unless the cut splits a token."""
        ids = list(turn.token_ids)
        if not cut:
            return ids
        before = self._encoder.encode_segments(turn.text[:cut])
        if ids[: len(before)] == before:
            return ids[len(before) :]
        start = bisect_left(range(len(ids)), cut, key=lambda count: len(self._decode_all(ids[:count])))
        if self._decode_all(ids[:start]) == turn.text[:cut]:
            return ids[start:]
        end = ids[-1:] if ids[-1:] and ids[-1] in self.stop_token_ids else []
        return self._encoder.encode(turn.text[cut:]) + end

    def _find_end_of_turn(self) -> int | None:
        """Return the special token that the template writes directly after an assistant's text, if there is one."""
        after = self.renderer.after_answer()
        ids = self._encoder.encode(after)
        added = self._tokenizer.get_added_tokens_decoder()
        token = added.get(ids[0]) if ids else None
        if token is None or not after.startswith(token.content):
            return None
        self.renderer.set_end_of_turn(str(token.content))
        return ids[0]


async def _in_thread(function: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(function)


def _characters(messages: Sequence[Message]) -> int:
    """Return the length of the messages' text."""
    count = 0
    for message in messages:
        content = message.get("content")
        count += len(content if type(content) is str else content_text(content))
    return count


def _eos_ids(folder: Path, tokenizer: "Tokenizer", template: ChatTemplate) -> set[int]:
    """Return every token that a file of the folder declares as end of sequence."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    eos = tokenizer.token_to_id(template.variables.get("eos_token") or "")
    if eos is not None:
        found.add(eos)
    return found
