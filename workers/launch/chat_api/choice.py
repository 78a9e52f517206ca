"""One choice of a chat completion: from sampled token ids to text, and to a message with tool calls."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from stream.records import Message
from workers.local_engine.model_thread import Generation
from workers.rollout.agent_endpoint.dialects.openai_chat import to_openai_message
from workers.rollout.agent_endpoint.messages import turn_message
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.engine_client.sampling import cut_at_stop
from workers.rollout.tool_formats.parsing import ParsedTurn, ToolFormat


class ChatPrompt(NamedTuple):
    """What is the same for all choices of a request."""

    chat: ChatTokenizer
    messages: list[Message]
    ids: Sequence[int]
    tool_format: ToolFormat | None
    """Format in which calls are parsed; None: calls are text."""
    stops: list[str]
    one_call: bool
    """Return only the first call of a turn."""
    with_logprobs: bool


class ChatChoice:
    """A sampled turn that becomes a message.

    Args:
        index: of the choice.
        generation: its tokens grow while it is read.
        prompt: of the request.
    """

    def __init__(self, index: int, generation: Generation, prompt: ChatPrompt) -> None:
        self.index, self.generation = index, generation
        self._prompt = prompt
        self._step = prompt.chat.text_stream()
        self._text = ""
        """Text of the tokens that were read, without the one that ends the turn."""
        self._read = 0
        """Number of tokens that were read."""
        self._sent = 0
        """Number of characters that were sent."""
        self._logprobs_sent = 0
        self.is_ended = False
        """The last part was read."""

    def message(self) -> tuple[Message, str]:
        """Return the finished turn as OpenAI's message, and why it ended."""
        text, stopped = cut_at_stop(self._prompt.chat.decode(self.generation.sampled), self._prompt.stops)
        turn = self._parse(text)
        message = to_openai_message(turn_message(turn, self._prompt.messages))
        if turn.calls and not turn.content:
            message["content"] = None
        return message, self._finish_reason(turn, stopped=stopped)

    def deltas(self) -> Iterator[dict[str, Any]]:
        """Yield the choice's part of each event that can be sent now; the last one has the reason of its end."""
        finished = self.generation.is_finished  # before the tokens are read: they are complete then
        self._read_tokens()
        if not finished:
            if text := self._text[self._sent : self._safe_length()]:
                self._sent += len(text)
                yield self._delta({"content": text})
            return
        message, reason = self.message()
        content = message.get("content") or ""
        is_prefix = content.startswith(self._text[: self._sent])  # not if white space before a call was removed
        if rest := content[self._sent :] if is_prefix else "":
            yield self._delta({"content": rest})
        for number, call in enumerate(message.get("tool_calls", ())):
            yield self._delta({"tool_calls": [{"index": number, **call}]})
        yield self._delta({}, reason)
        self.is_ended = True

    def logprobs(self, start: int = 0) -> dict[str, Any] | None:
        """Return the log-probs of the tokens from `start` on in OpenAI's form; None if they were not asked for."""
        if not self._prompt.with_logprobs:
            return None
        generation = self.generation
        content = []
        count = len(generation.top_logprobs)  # appended last: all lists have as many entries
        for token, logprob, top in zip(
            generation.sampled[start:count],
            generation.logprobs[start:count],
            generation.top_logprobs[start:count],
            strict=True,
        ):
            others = [self._token_logprob(other.token_id, other.logprob) for other in top]
            content.append(self._token_logprob(token, logprob) | {"top_logprobs": others})
        return {"content": content, "refusal": None}

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._prompt.chat.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    def _delta(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        logprobs = self.logprobs(self._logprobs_sent)
        self._logprobs_sent += len(logprobs["content"]) if logprobs else 0
        return {"index": self.index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}

    def _read_tokens(self) -> None:
        tokens = self.generation.sampled[self._read :]
        self._read += len(tokens)
        stop_token_ids = self._prompt.chat.stop_token_ids
        self._text += "".join(self._step(token) for token in tokens if token not in stop_token_ids)

    def _safe_length(self) -> int:
        """Return how many characters of the text are certainly content, whatever follows."""
        text, stops = self._text, self._prompt.stops
        limit = len(cut_at_stop(text, stops)[0])
        openings = self._prompt.tool_format.openings if self._prompt.tool_format is not None else ()
        limit = min([limit, *(found for opening in openings if (found := text.find(opening)) >= 0)])
        limit -= _length_of_beginning(text[:limit], (*stops, *openings))
        return len(text[:limit].rstrip()) if openings else limit

    def _parse(self, text: str) -> ParsedTurn:
        prompt = self._prompt
        if prompt.tool_format is None:
            return ParsedTurn(text)
        starts_in_reasoning = bool(prompt.chat.open_reasoning(prompt.ids))
        turn = prompt.tool_format.parse(text, starts_in_reasoning=starts_in_reasoning)
        return ParsedTurn(turn.content, turn.calls[:1], turn.errors) if prompt.one_call else turn

    def _finish_reason(self, turn: ParsedTurn, *, stopped: bool) -> str:
        if turn.calls and self.generation.finish_reason != "length":
            return "tool_calls"
        return "stop" if stopped else str(self.generation.finish_reason)


def _length_of_beginning(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of the text with which one of the markers begins."""
    longest = max(map(len, markers), default=0)
    return next(
        (
            length
            for length in range(min(longest - 1, len(text)), 0, -1)
            if any(marker.startswith(text[-length:]) for marker in markers)
        ),
        0,
    )
