r"""Encode texts that a chat template wrote, and decode tokens, each with less work than the whole tokenizer does.

A special token of the template, such as `<|im_start|>`, cuts a text in two that are tokenized independently of each
other. So a system message with the tools' schemas, and what stands around a tool's result, are tokenized once::

    <|im_start|>system\nYou are ...   <|im_end|>   \n<|im_start|>user\nWhat is 1 + 2?   <|im_end|> ...
    known                                                        tokenized

Tokenizers for which that may not hold encode whole texts.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_LONG_TEXT_CHARACTERS: Final = 20_000
_REMEMBERED_SEGMENTS: Final = 64
"""Of prompts: mostly system messages."""
_REMEMBERED_RESULTS: Final = 256
_SHORT_RESULT_CHARACTERS: Final = 1_000
"""Longer results are not remembered; a worker has no room for many of them."""
_ANY_TEXT: Final = "a"
_INDEPENDENT: Final = frozenset({"ByteLevel", "Split", "Digits", "NFC", "NFD", "NFKC", "NFKD"})
"""Normalizers and pre-tokenizers that treat each part between special tokens by itself, wherever it stands."""


class TextEncoder:
    """Encodes texts. Threads may share it.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._special: dict[str, int] = {}
        """Special tokens that cut texts."""
        self._cuts: re.Pattern[str] | None = None
        self._template_segments: dict[str, list[int]] = {}
        self._prompt_segment = lru_cache(maxsize=_REMEMBERED_SEGMENTS)(self.encode)
        self._short_result = lru_cache(maxsize=_REMEMBERED_RESULTS)(self.encode)

    def find_cuts(self, text: str) -> None:
        """Find the special tokens that cut texts, among those in a text that the template wrote."""
        self._special = _cutting_tokens(self._tokenizer, text)
        self._cuts = re.compile(f"({'|'.join(map(re.escape, self._special))})") if self._special else None

    def remember(self, texts: Iterable[str]) -> None:
        """Remember the segments that all of these texts have: they are the template's."""
        for segment in set.intersection(*(set(self._split(text)) for text in texts)):
            self._template_segments[segment] = self.encode(segment)

    def encode(self, text: str) -> list[int]:
        """Encode a text as a whole."""
        if len(text) < _LONG_TEXT_CHARACTERS:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)  # releases the GIL

    def encode_after_text(self, text: str) -> list[int]:
        """Encode a text that follows another one, without the blank that some tokenizers write before a first word."""
        before, ids = self.encode(_ANY_TEXT), self.encode(_ANY_TEXT + text)
        return ids[len(before) :] if ids[: len(before)] == before else self.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt; its segments are remembered for a while, since many prompts share some."""
        return self.encode_segments(text, self._prompt_segment)

    def encode_continuation(self, text: str) -> list[int]:
        """Encode the text between two turns; a group's completions often make the same calls, with the same results."""
        is_short = len(text) <= _SHORT_RESULT_CHARACTERS
        return self.encode_segments(text, self._short_result if is_short else self.encode)

    def encode_segments(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Encode a text; `encode` is called for each part between special tokens that is not the template's own."""
        if self._cuts is None or len(text) >= _LONG_TEXT_CHARACTERS:
            return self.encode(text)
        ids: list[int] = []
        for segment in self._split(text):
            if segment in self._special:
                ids.append(self._special[segment])
            elif (known := self._template_segments.get(segment)) is not None:
                ids += known
            else:
                ids += encode(segment)
        return ids

    def _split(self, text: str) -> list[str]:
        return [segment for segment in self._cuts.split(text) if segment] if self._cuts else [text]


@lru_cache(maxsize=8)
def decoder_of(tokenizer: "Tokenizer") -> Callable[[Sequence[int]], str]:
    """Return a function that decodes tokens, special ones included.

    For a byte-level tokenizer it joins the bytes of the tokens, which takes a third of the tokenizer's own time.
    """
    from tokenizers import decoders

    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    bytes_of = _TokenBytes(tokenizer).__getitem__
    return lambda ids: b"".join(map(bytes_of, ids)).decode("utf-8", "replace")


def stream_decoder_of(tokenizer: "Tokenizer") -> Callable[[int], str]:
    """Return a function that decodes one text token by token; each call returns what the token completes."""
    from tokenizers import decoders

    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        stream = decoders.DecodeStream(skip_special_tokens=False)
        return lambda token: stream.step(tokenizer, token) or ""
    bytes_of, decode = _TokenBytes(tokenizer).__getitem__, codecs.getincrementaldecoder("utf-8")("replace").decode
    return lambda token: decode(bytes_of(token))


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level tokenizer, found when they are needed."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._byte_of = _bytes_by_character()

    def __missing__(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token) or ""
        try:
            self[token] = found = bytes(map(self._byte_of.__getitem__, text))
        except KeyError:  # a special token, which is no bytes in disguise
            self[token] = found = text.encode()
        return found


def _bytes_by_character() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for: GPT-2's table."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _cutting_tokens(tokenizer: "Tokenizer", text: str) -> dict[str, int]:
    """Return the special tokens in a text at which the tokenizer cuts every text in independent parts."""
    if not _treats_parts_independently(tokenizer):
        return {}
    added = tokenizer.get_added_tokens_decoder()
    if any(token.single_word for token in added.values()):
        return {}
    return {
        token.content: id_
        for id_, token in added.items()
        if token.content in text and _is_cut(token) and not any(_overlap(token, other) for other in added.values())
    }


def _is_cut(token: "AddedToken") -> bool:
    return token.special and not (token.normalized or token.lstrip or token.rstrip)


def _overlap(token: "AddedToken", other: "AddedToken") -> bool:
    """Return whether another token may be found in a text where this one begins."""
    a, b = token.content, other.content
    if a == b:
        return False
    return a in b or any(b.endswith(a[:n]) for n in range(1, len(a)))


def _treats_parts_independently(tokenizer: "Tokenizer") -> bool:
    from tokenizers import models

    if not isinstance(tokenizer.model, models.BPE) or tokenizer.model.dropout:
        return False
    parts = [*_parts(tokenizer.normalizer, "normalizers"), *_parts(tokenizer.pre_tokenizer, "pretokenizers")]
    return all(part.get("type") in _INDEPENDENT and not part.get("add_prefix_space") for part in parts)


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """Return the settings of a normalizer or pre-tokenizer; of a sequence, those of its parts."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    return list(settings[name]) if settings.get("type") == "Sequence" else [settings]
