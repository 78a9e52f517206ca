"""Which part of a program asks: its own names for its conversations, from the headers of its requests.

An own loop may say so by these headers::

    X-Penstock-Role: sub          main, sub, compact, side or other
    X-Penstock-Branch: search-3   its name for the conversation
    X-Penstock-Parent: search     the name of the conversation that started it
    X-Penstock-Train: 0           this conversation is not trained

The headers of known programs mean the same, and say that the program repeats a request only if its answer was lost.
Without any, the requests themselves decide (`roles`).
"""

import json
from collections.abc import Callable, Mapping
from typing import Final

from stream.records import BranchRole
from workers.rollout.agent_endpoint.neutral import RequestRefusedError, RequestSource

_ROLE, _BRANCH, _PARENT, _TRAIN = (f"X-Penstock-{name}" for name in ("Role", "Branch", "Parent", "Train"))
_MAX_NAME: Final = 200
"""Characters of a name that are kept."""

Headers = Mapping[str, str]


def source_of(headers: Headers) -> RequestSource:
    """Return who asks; names of headers are found in lower case.

    Raises:
        RequestRefusedError: a header of an own loop has an unknown value.
    """
    for read in _READERS:
        if (source := read(headers)) is not None:
            return source._replace(name=source.name[:_MAX_NAME], parent=source.parent[:_MAX_NAME])
    return RequestSource()


def _own_loop(headers: Headers) -> RequestSource | None:
    given = {name: headers.get(name.lower()) for name in (_ROLE, _BRANCH, _PARENT, _TRAIN)}
    if all(value is None for value in given.values()):
        return None
    role, trains = given[_ROLE], given[_TRAIN]
    if role is not None and role not in set(BranchRole):
        raise RequestRefusedError(f"{_ROLE}: {role!r} is no role; the roles are {', '.join(BranchRole)}", _ROLE)
    if trains not in {None, "0", "1"}:
        raise RequestRefusedError(f"{_TRAIN}: {trains!r} is neither 0 nor 1", _TRAIN)
    return RequestSource(
        BranchRole(role) if role else None, given[_BRANCH] or "", given[_PARENT] or "", is_trained=trains != "0"
    )


def _claude_code(headers: Headers) -> RequestSource | None:
    session, agent = headers.get("x-claude-code-session-id"), headers.get("x-claude-code-agent-id")
    if session is None:
        return None
    source = RequestSource(BranchRole.SUB, agent, session) if agent else RequestSource(name=session)
    return source._replace(repeats_lost=True)


def _codex(headers: Headers) -> RequestSource | None:
    thread, parent = headers.get("thread-id"), headers.get("x-codex-parent-thread-id", "")
    if thread is None or "x-codex-window-id" not in headers:
        return None
    is_sub = bool(parent or headers.get("x-openai-subagent"))
    role = BranchRole.COMPACT if _codex_compacts(headers) else BranchRole.SUB if is_sub else None
    return RequestSource(role, thread, parent, repeats_lost=True)


def _codex_compacts(headers: Headers) -> bool:
    try:
        metadata = json.loads(headers.get("x-codex-turn-metadata", "{}"))
    except (ValueError, RecursionError):
        return False
    return isinstance(metadata, dict) and metadata.get("request_kind") == "compaction"


def _opencode(headers: Headers) -> RequestSource | None:
    session, parent = headers.get("x-session-id"), headers.get("x-parent-session-id", "")
    if session is None:
        return None
    return RequestSource(BranchRole.SUB if parent else None, session, parent, repeats_lost=True)


_READERS: Final[tuple[Callable[[Headers], RequestSource | None], ...]] = (_own_loop, _claude_code, _codex, _opencode)
