"""Stop strings: text is looked at while it is sampled, so that a turn ends where one of them is complete."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from stream.errors import EngineError, EngineRefusedError


class StopStringMatcher:
    """One request's text, as far as a stop string could still begin in it.

    Args:
        tokenizer: the model's.
        prompt: what the text goes on from.
        stops: the strings.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        self._stops = stops
        self._tail_length = max(map(len, stops)) - 1
        self._tail = ""

    def append(self, token: int, *, may_stop: bool) -> bool:
        """Whether this token completes a stop string; one that does not count is read all the same."""
        before, text = len(self._tail), self._tail + (self._stream.step(self._tokenizer, token) or "")
        self._tail = text[-self._tail_length :] if self._tail_length else ""
        return may_stop and any(stop in text[max(0, before + 1 - len(stop)) :] for stop in self._stops)


def load_tokenizer(model: Path) -> Tokenizer | None:
    """The tokenizer in a model's folder, if there is one in the form that every model of today has.

    Raises:
        EngineError: there is one that cannot be read.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more exact
        raise EngineError(f"{file}: no tokenizer can be read from it: {error}; fetch it again") from error


def make_matcher(tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> StopStringMatcher | None:
    """What looks for a request's stop strings; None where it has none.

    Raises:
        EngineRefusedError: an empty string, or a model without a tokenizer.
    """
    if not stops:
        return None
    if not all(stops):
        raise EngineRefusedError("stop holds an empty string, with which every turn would end before it begins")
    if tokenizer is None:
        raise EngineRefusedError("stop: this model has no tokenizer.json, so its text is unknown; use stop_token_ids")
    return StopStringMatcher(tokenizer, prompt, stops)
