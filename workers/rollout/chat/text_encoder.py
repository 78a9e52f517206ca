r"""Encode texts that a chat template wrote, with less work than the whole tokenizer does.

A special token of the template, such as `<|im_start|>`, cuts a text in two that are tokenized independently of each
other. So a system message with the tools' schemas, what stands around a tool's result, and the results of a
conversation that is rendered again are tokenized once::

    <|im_start|>system\nYou are ...   <|im_end|>   \n<|im_start|>user\nWhat is 1 + 2?   <|im_end|> ...
    known                                                        tokenized

Tokenizers for which that may not hold encode whole texts.
"""

import json
import re
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from cachetools import LRUCache, cached

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_LONG_TEXT_CHARACTERS: Final = 20_000
_CACHED_TOKENS: Final = 500_000
"""About 20 MB: the results of some sixty conversations of sixty turns."""
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
        cache: LRUCache[Any, list[int]] = LRUCache(_CACHED_TOKENS, getsizeof=_cache_size)
        self._encode_once = cached(cache, lock=Lock())(self.encode)

    def find_cuts(self, text: str) -> None:
        """Find the special tokens that cut texts, among those in a text that the template wrote."""
        self._special = _cutting_tokens(self._tokenizer, text)
        self._cuts = re.compile(f"({'|'.join(map(re.escape, self._special))})") if self._special else None

    def encode(self, text: str) -> list[int]:
        """Encode a text as a whole."""
        if len(text) < _LONG_TEXT_CHARACTERS:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)  # releases the GIL

    def encode_after_text(self, text: str) -> list[int]:
        """Encode a text that follows another one, without the blank that some tokenizers write before a first word."""
        before, ids = self._encode_once(_ANY_TEXT), self._encode_once(_ANY_TEXT + text)
        return ids[len(before) :] if ids[: len(before)] == before else self.encode(text)

    def encode_segments(self, text: str) -> list[int]:
        """Encode a text; its parts between special tokens are remembered for a while."""
        ids: list[int] = []
        for segment in filter(None, self._cuts.split(text) if self._cuts else [text]):
            special = self._special.get(segment)
            ids += self._encode_once(segment) if special is None else [special]
        return ids


def _cache_size(ids: list[int]) -> int:
    """Return how many tokens take as much memory as a text and its tokens."""
    return len(ids) + 16


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
