"""What each role may do on the server, as ACL rules: the commands of its scripts on the keys that they change.

Redis checks the commands of a script against its caller's rules, so the rules hold for every script that a worker
might run. An `AclRule` becomes a *selector*: its commands on its keys and nothing else. Key names here have no
prefix; `stream/lua/common.lua` says what each key holds.
"""

import re
from collections.abc import Iterable
from typing import Literal, get_args

from msgspec import Struct

from stream.connection.keys import EVALUATION_STAGES, STAGES, EvaluationStage, StageName, key, key_prefix
from stream.errors import PenstockError

AclRole = Literal["feed", "rollout", "score", "train", "run", "operator", "viewer"]
ACL_ROLES: tuple[AclRole, ...] = get_args(AclRole)
"""The four roles; `run`: `penstock run`, which starts them all under its own user; `operator`: pause, resume, stop,
dead letters and engine overrides; `viewer`: `penstock queues` and `audit`, which write nothing."""


class AclRule(Struct, frozen=True):
    """Commands on keys."""

    commands: tuple[str, ...]
    keys: tuple[str, ...]


_READ_COMMANDS = (
    *("get", "mget", "exists", "scard", "sismember", "sscan"),
    *("hget", "hgetall", "hexists", "hkeys", "hlen", "hmget", "hscan"),
    *("xlen", "xpending", "xrange", "xread", "xrevrange", "zcard", "zrange", "zrangebyscore"),
)
_SERVER_COMMANDS = ("info", "ping", "time", "evalsha", "script|load", "cluster|slots", "select")
"""Commands without a key, except EVALSHA, whose first key is the run's prefix and holds nothing."""
_SUBKEYS = ("leases", "retries", "attempts", "rate")


def _subkeys(stage: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{stage}:{name}" for name in names)


_WAKE = AclRule(("xadd",), ("wake",))
_STREAMS = AclRule(("xgroup|create",), (*STAGES, *EVALUATION_STAGES))
"""Every role creates the streams if they do not exist."""
_IDENTITY = AclRule(("hset", "hsetnx", "hdel"), ("identity",))
"""Every role records what the server does not know about the run."""
_SERVER_RESTARTED = (
    AclRule(("zadd",), tuple(f"{stage}:leases" for stage in (*STAGES, *EVALUATION_STAGES))),
    AclRule(("hset",), ("server",)),
)
"""Every role extends all leases if it is the first to notice a restart of the server (`extend_after_restart`)."""


def _worker_rules(stage: StageName | EvaluationStage) -> tuple[AclRule, ...]:
    """Return the rules for claiming, renewing, releasing and dead-lettering entries of a stage."""
    of_training = stage in STAGES
    return (
        AclRule(("xreadgroup", "xclaim", "xack", "xdel"), (stage,)),
        AclRule(("zadd", "zrem"), _subkeys(stage, "leases", "retries")),
        AclRule(("hset", "hincrby", "hdel"), _subkeys(stage, "attempts")),
        AclRule(("hset",), _subkeys(stage, "rate")),
        AclRule(("unlink",), _subkeys(stage, "partials:*", "payload:*")),
        AclRule(("rename",), (*_subkeys(stage, "payload:*"), "dead:payload:*")),
        AclRule(("hset", "hdel"), ("unfinished" if of_training else "eval:unfinished",)),
        *(
            (AclRule(("zadd", "zrem"), ("inflight_versions",)), AclRule(("hincrby",), ("counts",)))
            if of_training
            else ()
        ),
        AclRule(("xadd",), ("dead",)),
        AclRule(("hset",), ("last_errors",)),
        *((AclRule(("hset",), ("dead_prompts",)), AclRule(("xadd",), ("unrecorded",))) if of_training else ()),
        *_SERVER_RESTARTED,
    )


def _output_rules(stage: StageName | EvaluationStage) -> tuple[AclRule, ...]:
    """Return the rules for adding a group to a stage."""
    return (
        AclRule(("xadd",), (stage,)),
        AclRule(("set", "persist", "unlink"), _subkeys(stage, "incoming:*")),
        AclRule(("rename",), _subkeys(stage, "incoming:*", "payload:*")),
    )


_FEED = (
    AclRule(("hset",), ("unfinished",)),
    AclRule(("xadd",), ("prompts",)),
    AclRule(("hset", "hdel"), ("feed",)),
    AclRule(("hset",), ("meta",)),
    AclRule(("hset", "hdel"), ("eval",)),
    AclRule(("hset", "unlink"), ("eval:dataset",)),
    AclRule(("hincrby",), ("counts",)),
    AclRule(("xadd",), ("dead",)),
    AclRule(("hset",), ("dead_prompts",)),
    AclRule(("sadd",), ("dropped_dead",)),
)
_ROLLOUT = (
    *_worker_rules("prompts"),
    *_output_rules("groups"),
    AclRule(("hset",), _subkeys("prompts", "partials:*")),
    *_worker_rules("eval:prompts"),
    *_output_rules("eval:groups"),
    AclRule(("set",), ("in_flight:prompts:*", "in_flight:eval:prompts:*")),
)
_SCORE = (
    *_worker_rules("groups"),
    *_output_rules("scored"),
    AclRule(("rename",), ("groups:payload:*", "scored:payload:*")),
    *_worker_rules("eval:groups"),
    AclRule(("hset",), ("eval:results",)),
    AclRule(("set",), ("in_flight:groups:*", "in_flight:eval:groups:*")),
)
_EVALUATE = (
    AclRule(("xadd", "unlink"), EVALUATION_STAGES),
    AclRule(("unlink",), tuple(name for stage in EVALUATION_STAGES for name in _subkeys(stage, *_SUBKEYS[:3]))),
    AclRule(("unlink",), tuple(n for stage in EVALUATION_STAGES for n in _subkeys(stage, "partials:*", "payload:*"))),
    AclRule(("hset", "unlink"), ("eval:unfinished",)),
    AclRule(("unlink",), ("eval:results",)),
    AclRule(("hset", "hdel"), ("eval",)),
)
_TRAIN = (
    *_worker_rules("scored"),
    AclRule(("hset", "hdel"), ("scored:marked", "scored:counted", "policy", "meta", "counts", "latest")),
    AclRule(("hdel",), ("feed",)),
    AclRule(("hset", "unlink"), ("model_files",)),
    AclRule(("set", "unlink"), ("ledger_ends",)),
    AclRule(("hset", "hdel", "hsetnx"), ("dead_prompts",)),
    AclRule(("sadd", "srem"), ("dropped_dead",)),
    AclRule(("xdel",), ("unrecorded",)),
    AclRule(("unlink",), tuple(name for stage in STAGES for name in (stage, *_subkeys(stage, *_SUBKEYS[:3])))),
    AclRule(("unlink",), ("scored:marked", "scored:counted", "inflight_versions", "unpublished", "unfinished")),
    AclRule(("zadd", "zrem", "zremrangebyscore"), ("unpublished",)),
    AclRule(("hset",), ("unfinished",)),
    AclRule(("xadd", "xdel"), ("dead",)),
    AclRule(("xadd",), ("published",)),
    AclRule(("unlink",), tuple(name for stage in STAGES for name in _subkeys(stage, "partials:*", "payload:*"))),
    *_EVALUATE,
)
_OPERATOR = (
    AclRule(("hset", "hdel"), ("meta",)),
    AclRule(("xadd",), (*STAGES, "engines")),
    AclRule(("xdel",), ("dead",)),
    AclRule(("unlink",), ("dead:payload:*",)),
    AclRule(("rename",), ("dead:payload:*", *(f"{stage}:payload:*" for stage in STAGES))),
    AclRule(("sadd",), ("dropped_dead",)),
    AclRule(("hdel",), ("dead_prompts",)),
    AclRule(("xadd",), ("unrecorded",)),
    AclRule(("hset",), ("unfinished",)),
    AclRule(("hincrby",), ("counts",)),
)
_WRITE_RULES: dict[AclRole, tuple[AclRule, ...]] = {
    "feed": (*_FEED, _STREAMS, _IDENTITY, _WAKE),
    "rollout": (*_ROLLOUT, _STREAMS, _IDENTITY, _WAKE),
    "score": (*_SCORE, _STREAMS, _IDENTITY, _WAKE),
    "train": (*_TRAIN, _STREAMS, _IDENTITY, _WAKE),
    "run": (*_FEED, *_ROLLOUT, *_SCORE, *_TRAIN, _STREAMS, _IDENTITY, _WAKE),
    "operator": (*_OPERATOR, _WAKE),
    "viewer": (),
}


def acl_user(role: AclRole, run: str) -> str:
    """Return the name of a run's user for a role."""
    return f"{run}-{role}"


def acl_rules(role: AclRole, run: str) -> list[str]:
    """Return the arguments of `ACL SETUSER` that let a user do a role's work on one run, and nothing else.

    Passwords stay unchanged: a new user has none, and nobody can log in as it before one is added.

    Raises:
        PenstockError: the run's name has spaces or parentheses.
    """
    if re.search(r"[\s()]", run):
        raise PenstockError(f"run {run!r} cannot have ACL rules: spaces and parentheses in a name separate rules")
    return [
        *("on", "resetchannels", "resetkeys", "clearselectors", "-@all"),
        f"~{_escape(key_prefix(run))}",
        f"%R~{_escape(key_prefix(run))}:*",
        *(f"+{command}" for command in (*_SERVER_COMMANDS, *_READ_COMMANDS)),
        *(_selector(grant, run) for grant in _merge(_WRITE_RULES[role])),
    ]


def aclfile_line(role: AclRole, run: str) -> str:
    """Return the line of an `aclfile` that creates the user; add a password to it (`>PASSWORD`)."""
    return " ".join(("user", acl_user(role, run), *acl_rules(role, run)))


def _selector(grant: AclRule, run: str) -> str:
    allowed = (f"+{command}" for command in grant.commands)
    return f"({' '.join((*allowed, *(f'~{_pattern(key(run, name))}' for name in grant.keys)))})"


def _pattern(name: str) -> str:
    """Return a pattern for this key, or for all keys with this beginning if the name ends in a star."""
    return f"{_escape(name.removesuffix('*'))}{'*' if name.endswith('*') else ''}"


def _escape(name: str) -> str:
    """Return a pattern that matches exactly this name."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", name)


def _merge(grants: Iterable[AclRule]) -> list[AclRule]:
    """Merge rules so that keys with the same commands share one; the server checks selectors one by one.

    One selector must allow all keys of a command, so rules for RENAME, which has two, stay as they are.
    """
    of_one_key: list[AclRule] = []
    renames: list[AclRule] = []
    for grant in dict.fromkeys(grants):
        (renames if grant.commands == ("rename",) else of_one_key).append(grant)
    commands: dict[str, set[str]] = {}
    for grant in of_one_key:
        for name in grant.keys:
            commands.setdefault(name, set()).update(grant.commands)
    keys: dict[tuple[str, ...], list[str]] = {}
    for name, found in commands.items():
        keys.setdefault(tuple(sorted(found)), []).append(name)
    return [*(AclRule(found, tuple(sorted(names))) for found, names in keys.items()), *renames]
