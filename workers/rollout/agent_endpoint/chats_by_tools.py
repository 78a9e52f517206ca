"""The chat of one model with the tools of each request, and what its template can do with them.

A program sends its tools with each request. The first use of a list costs up to seconds of a thread.
"""

import hashlib
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import anyio
import msgspec

from stream.errors import PenstockError
from workers.rollout.agent_endpoint.neutral import RequestRefusedError
from workers.rollout.agent_endpoint.role_rules import RoleRules, find_role_rules
from workers.rollout.chat.chat_tokenizer import ChatTokenizer

_MAX_TOOL_SETS: Final = 64
"""Distinct lists of tools to cache; a model and an environment mostly have one."""


class KnownChat(NamedTuple):
    """A model's chat with a list of tools."""

    chat: ChatTokenizer
    takes_tools: bool
    """The template shows calls and their results. If not, each turn is rendered as a whole, in a row of its own."""
    rules: RoleRules
    digest: bytes
    """Of the tools."""


class ChatsByTools:
    """Makes the chat for each list of tools once."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._cache: dict[bytes, KnownChat] = {}
        self._making: dict[bytes, anyio.Lock] = {}

    async def get(self, tools: list[dict[str, Any]] | None) -> KnownChat:
        """Return the chat with these tools; requests that come meanwhile wait for it.

        Raises:
            RequestRefusedError: they hold what a record cannot hold.
        """
        try:
            key = hashlib.blake2b(msgspec.msgpack.encode(tools), digest_size=16).digest()
        except (ValueError, OverflowError, RecursionError) as error:
            raise RequestRefusedError(f"the request holds values that a record cannot hold: {error}") from error
        if found := self._cache.get(key):
            return found
        async with self._making.setdefault(key, anyio.Lock()):
            if key not in self._cache:
                if len(self._cache) >= _MAX_TOOL_SETS:
                    self._cache.clear()
                made = await anyio.to_thread.run_sync(partial(_chat_with_tools, self._chat, tools, key))
                self._cache[key] = made
            self._making.pop(key, None)
            return self._cache[key]


@lru_cache(maxsize=32)
def chats_by_tools(chat: ChatTokenizer) -> ChatsByTools:
    """Return the cache that all groups of an environment share, so that each list of tools is checked once."""
    return ChatsByTools(chat)


def _chat_with_tools(chat: ChatTokenizer, tools: list[dict[str, Any]] | None, digest: bytes) -> KnownChat:
    chat = chat.with_tools(tools)
    rules = find_role_rules(chat)
    try:
        history = chat.check_history(with_user_replies=True)
        if history.rewrites_history:  # perhaps after a user message only, as many templates do
            chat.check_history()
    except PenstockError:
        return KnownChat(chat, False, rules, digest)
    return KnownChat(chat, True, rules, digest)
