"""Detect stop strings in the text of sampled tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from stream.errors import EngineError, EngineRefusedError


class StopStringMatcher:
    """Searches the sampled text of one request; stores only its end, where a stop string may begin.

    Args:
        tokenizer: tokenizer of the model.
        prompt: tokens before the sampled text.
        stops: stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        self._stops = stops
        self._tail_length = max(map(len, stops)) - 1
        self._tail = ""

    def append(self, token: int, *, may_stop: bool) -> bool:
        """Append a token. Returns whether it completes a stop string; always False without `may_stop`."""
        before, text = len(self._tail), self._tail + (self._stream.step(self._tokenizer, token) or "")
        self._tail = text[-self._tail_length :] if self._tail_length else ""
        return may_stop and any(stop in text[max(0, before + 1 - len(stop)) :] for stop in self._stops)


def load_tokenizer(model: Path) -> Tokenizer | None:
    """Load `tokenizer.json` of a model folder; None if there is none.

    Raises:
        EngineError: the file cannot be read.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain `Exception`
        raise EngineError(f"{file} is not a readable tokenizer: {error}; download it again") from error


def make_matcher(tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> StopStringMatcher | None:
    """Return a matcher for a request's stop strings; None if it has none.

    Raises:
        EngineRefusedError: a stop string is empty, or the model has no tokenizer.
    """
    if not stops:
        return None
    if not all(stops):
        raise EngineRefusedError("stop contains an empty string, which would end every turn before it begins")
    if tokenizer is None:
        raise EngineRefusedError("stop: this model has no tokenizer.json to decode tokens with; use stop_token_ids")
    return StopStringMatcher(tokenizer, prompt, stops)
