"""What each role may do on a server, as ACL rules: the commands of its scripts, on the keys that they use them on.

A script may do what its caller may do, so the rules hold for whatever a worker would run there. A grant becomes a
*selector*: its commands on its keys, and nothing beside. Keys are named without the run's prefix; what they hold is
told in `lua/common.lua`.
"""

import re
from collections.abc import Iterable
from typing import Literal, get_args

from msgspec import Struct

from stream.errors import PenstockError
from stream.keys import EVALUATION_STAGES, STAGES, EvaluationStage, StageName, key, prefix

AclRole = Literal["feed", "rollout", "score", "train", "run", "operator", "look"]
ACL_ROLES: tuple[AclRole, ...] = get_args(AclRole)
"""The four roles; `run`: `penstock run`, which starts them all under its own user; `operator`: pause, resume, stop,
dead letters and the list of engines; `look`: `penstock queues` and `audit`, which write nothing."""


class Grant(Struct, frozen=True):
    """Commands on keys."""

    commands: tuple[str, ...]
    keys: tuple[str, ...]


_READING = (
    *("hget", "hgetall", "hexists", "hkeys", "hlen", "hmget", "exists", "hscan", "scard", "sscan"),
    *("xlen", "xpending", "xrange", "xread", "xrevrange", "zcard", "zrange", "zrangebyscore"),
)
_ASKING = ("info", "time", "evalsha", "script|load", "cluster|slots", "select")
"""Without a key, but for EVALSHA's first one, which is the run's prefix and holds nothing."""
_SUBKEYS = ("leases", "retries", "attempts", "rate")


def _subkeys(stage: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{stage}:{name}" for name in names)


_WAKE = Grant(("xadd",), ("wake",))
_STREAMS = Grant(("xgroup|create",), (*STAGES, *EVALUATION_STAGES))
"""Whoever comes first makes them."""
_SERVER_CAME_BACK = (
    Grant(("zadd",), tuple(f"{stage}:leases" for stage in (*STAGES, *EVALUATION_STAGES))),
    Grant(("hset",), ("server",)),
)
"""All leases start anew, and whoever finds out does it: `came_back`."""


def _working(stage: StageName | EvaluationStage) -> tuple[Grant, ...]:
    """Claim, renew, release and bury in a stage."""
    of_training = stage in STAGES
    return (
        Grant(("xreadgroup", "xclaim", "xack", "xdel"), (stage,)),
        Grant(("zadd", "zrem"), _subkeys(stage, "leases", "retries")),
        Grant(("hincrby", "hdel"), _subkeys(stage, "attempts")),
        Grant(("hset",), _subkeys(stage, "rate")),
        Grant(("unlink",), _subkeys(stage, "kept:*")),
        Grant(("hset", "hdel"), ("open" if of_training else "eval:open",)),
        *((Grant(("zadd", "zrem"), ("started",)), Grant(("hincrby",), ("counts",))) if of_training else ()),
        Grant(("xadd",), ("dead",)),
        *_SERVER_CAME_BACK,
    )


_FEED = (
    Grant(("hset",), ("open",)),
    Grant(("xadd",), ("prompts",)),
    Grant(("hset",), ("feed", "meta")),
    Grant(("hset", "hdel"), ("eval",)),
    Grant(("hset", "unlink"), ("eval:set",)),
    Grant(("hincrby",), ("counts",)),
)
_ROLLOUT = (
    *_working("prompts"),
    Grant(("xadd",), ("groups",)),
    Grant(("hset",), _subkeys("prompts", "attempts", "kept:*")),
    *_working("eval:prompts"),
    Grant(("xadd",), ("eval:groups",)),
)
_SCORE = (
    *_working("groups"),
    Grant(("xadd",), ("scored",)),
    *_working("eval:groups"),
    Grant(("hset",), ("eval:outcomes",)),
)
_EVALUATE = (
    Grant(("xadd", "unlink"), EVALUATION_STAGES),
    Grant(("unlink",), tuple(name for stage in EVALUATION_STAGES for name in _subkeys(stage, *_SUBKEYS[:3]))),
    Grant(("hset", "unlink"), ("eval:open",)),
    Grant(("unlink",), ("eval:outcomes",)),
    Grant(("hset", "hdel"), ("eval",)),
)
_TRAIN = (
    *_working("scored"),
    Grant(("hset", "hdel"), ("scored:ended", "policy", "meta", "counts", "latest")),
    Grant(("zadd", "zrem", "zremrangebyscore"), ("places",)),
    Grant(("hset",), ("open",)),
    Grant(("xadd", "xdel"), ("dead",)),
    Grant(("xadd",), ("published",)),
    *_EVALUATE,
)
_OPERATE = (
    Grant(("hset", "hdel"), ("meta",)),
    Grant(("xadd",), (*STAGES, "engines")),
    Grant(("xdel",), ("dead",)),
    Grant(("sadd",), ("removed",)),
    Grant(("hset",), ("open",)),
    Grant(("hincrby",), ("counts",)),
)
_WRITING: dict[AclRole, tuple[Grant, ...]] = {
    "feed": (*_FEED, _STREAMS, _WAKE),
    "rollout": (*_ROLLOUT, _STREAMS, _WAKE),
    "score": (*_SCORE, _STREAMS, _WAKE),
    "train": (*_TRAIN, _STREAMS, _WAKE),
    "run": (*_FEED, *_ROLLOUT, *_SCORE, *_TRAIN, _STREAMS, _WAKE),
    "operator": (*_OPERATE, _WAKE),
    "look": (),
}


def user(role: AclRole, run: str) -> str:
    """The user's name: one for each run and role."""
    return f"{run}-{role}"


def rules(role: AclRole, run: str) -> list[str]:
    """What `ACL SETUSER` takes to let a user do a role's work on one run, and nothing else.

    It leaves passwords as they are: a new user has none, and nobody can be it before one is added.

    Raises:
        PenstockError: the run's name cannot be part of a rule.
    """
    if re.search(r"[\s()]", run):
        raise PenstockError(f"a run called {run!r} can have no ACL rules: spaces and parentheses divide them")
    return [
        *("on", "resetchannels", "resetkeys", "clearselectors", "-@all"),
        f"~{_literal(prefix(run))}",
        f"%R~{_literal(prefix(run))}:*",
        *(f"+{command}" for command in (*_ASKING, *_READING)),
        *(_selector(grant, run) for grant in _merged(_WRITING[role])),
    ]


def aclfile_line(role: AclRole, run: str) -> str:
    """The line of an `aclfile` that makes the user; a password is still to be added (`>PASSWORD`)."""
    return " ".join(("user", user(role, run), *rules(role, run)))


def _selector(grant: Grant, run: str) -> str:
    allowed = (f"+{command}" for command in grant.commands)
    return f"({' '.join((*allowed, *(f'~{_pattern(key(run, name))}' for name in grant.keys)))})"


def _pattern(name: str) -> str:
    """A pattern for this key, or for all that begin so where it ends in a star."""
    return f"{_literal(name.removesuffix('*'))}{'*' if name.endswith('*') else ''}"


def _literal(name: str) -> str:
    """A pattern that matches this name alone."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", name)


def _merged(grants: Iterable[Grant]) -> list[Grant]:
    """One grant for all keys that bear the same commands: the server tries them one by one."""
    commands: dict[str, set[str]] = {}
    for grant in grants:
        for name in grant.keys:
            commands.setdefault(name, set()).update(grant.commands)
    keys: dict[tuple[str, ...], list[str]] = {}
    for name, found in commands.items():
        keys.setdefault(tuple(sorted(found)), []).append(name)
    return [Grant(found, tuple(sorted(names))) for found, names in keys.items()]
