"""The ACL rules of a role include every command and key that its scripts use."""

import re
from pathlib import Path

import pytest

from stream.connection.keys import STAGES
from stream.errors import PenstockError
from stream.operator.acl import _READ_COMMANDS, _SERVER_COMMANDS, _WRITE_RULES, ACL_ROLES, acl_rules, aclfile_line

LUA = Path(__file__).parents[2] / "stream" / "lua"
SCRIPTS = {
    "feed": ["feed"],
    "rollout": ["claim", "renew_leases", "complete", "release", "dead_letter", "save_partial", "begin_alone"],
    "score": ["claim", "renew_leases", "complete", "release", "dead_letter", "record_evaluation", "begin_alone"],
    "train": [
        *("claim", "renew_leases", "release", "dead_letter", "acquire_trainer", "renew_trainer", "recover", "commit"),
        *("reserve_version", "publish_version", "mark_duplicates", "scan_entries", "acknowledge", "finish_run"),
        *("begin_evaluation", "evaluation_progress", "end_evaluation", "read_recovery", "rebuild", "identify"),
    ],
    "operator": ["run_status", "set_control", "resolve_dead_letter", "set_engine_override"],
    "viewer": ["run_status", "scan_entries"],
}
"""The scripts that each role calls; `run` calls the scripts of the first four roles."""
SCRIPTS["run"] = sorted(
    {name for role in ("feed", "rollout", "score", "train") for name in SCRIPTS[role]}
    | {"run_status", "release_worker"}
)


def code(name: str) -> str:
    return "\n".join(line for line in (LUA / f"{name}.lua").read_text().splitlines() if not line.startswith("--"))


def functions() -> dict[str, str]:
    """Return the functions of `common.lua` with their bodies, by name."""
    result = re.findall(
        r"^local function (\w+)\((?:.*?)\)(.*?)(?=^local |\Z)", code("common"), re.MULTILINE | re.DOTALL
    )
    return dict(result)


def reached(script: str) -> str:
    """Return a script's code with the functions of `common.lua` that it calls."""
    common, text = functions(), code(script)
    while more := [name for name, body in common.items() if re.search(rf"\b{name}\(", text) and body not in text]:
        text += "".join(common[name] for name in more)
    return text


def commands(script: str) -> set[str]:
    return {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", reached(script))}


@pytest.mark.parametrize("role", SCRIPTS)
def test_a_role_is_granted_every_command_of_its_scripts(role):
    granted = {
        *_SERVER_COMMANDS,
        *_READ_COMMANDS,
        *(command for grant in _WRITE_RULES[role] for command in grant.commands),
    }
    granted |= {"xgroup"} if "xgroup|create" in granted else set()
    for script in SCRIPTS[role]:
        assert commands(script) <= granted, script


WRITES = {
    *("xadd", "xack", "xdel", "xclaim", "xreadgroup", "zadd", "zrem", "zremrangebyscore", "hset", "hdel", "hincrby"),
    *("sadd", "srem"),
}


def written(script: str) -> set[tuple[str, str]]:
    """Return (command, key) of the writes whose key is a literal."""
    result = re.findall(r"redis\.p?call\('(\w+)', key\('([\w:]+)'\)", reached(script))
    return {(command.lower(), name) for command, name in result if command.lower() in WRITES}


@pytest.mark.parametrize("role", SCRIPTS)
def test_a_role_is_granted_every_write_with_a_literal_key(role):
    granted = {(command, name) for grant in _WRITE_RULES[role] for command in grant.commands for name in grant.keys}
    for script in SCRIPTS[role]:
        assert written(script) <= granted, script


@pytest.mark.parametrize(
    ("name", "writers"),
    [
        ("prompts:rate", {"rollout"}),
        ("groups:rate", {"score"}),
        ("scored:counted", {"train"}),
        ("published", {"train"}),
        ("policy", {"train"}),
        ("scored:marked", {"train"}),
        ("unpublished", {"train"}),
        ("latest", {"train"}),
        ("eval:results", {"score", "train"}),
        ("eval:dataset", {"feed"}),
        ("feed", {"feed", "train"}),
        ("engines", {"operator"}),
        ("dropped_dead", {"operator", "feed", "train"}),
    ],
)
def test_keys_of_one_role_are_written_by_no_other(name, writers):
    granted = {role for role, grants in _WRITE_RULES.items() if any(name in grant.keys for grant in grants)}
    assert granted - {"run"} == writers


def test_the_parser_of_scripts_finds_known_commands():
    assert {"xclaim", "zadd", "hset", "time", "info", "xreadgroup"} <= commands("claim")
    assert ("xadd", "dead") in written("claim")
    assert ("hset", "policy") in written("renew_trainer")
    assert commands("run_status") <= {*_READ_COMMANDS, "time", "info"}


def test_every_script_belongs_to_a_role():
    everything = {path.stem for path in LUA.glob("*.lua")} - {"common"}
    assert {name for names in SCRIPTS.values() for name in names} == everything


def test_no_rule_covers_another_run_or_all_keys():
    for role in _WRITE_RULES:
        patterns: list[str] = re.findall(r"[%RW]*~[^ )]+", " ".join(acl_rules(role, "demo")))
        assert all(pattern.lstrip("%R").startswith("~{demo}") for pattern in patterns), role
        wide = {
            pattern
            for pattern in patterns
            if "*" in pattern and not re.search(":(partials|payload|incoming|in_flight):", pattern)
        }
        assert wide == {"%R~{demo}:*"}, role


def test_special_characters_in_a_run_name_are_escaped():
    assert "~{a\\*b\\[c\\]\\?}" in acl_rules("viewer", "a*b[c]?")
    with pytest.raises(PenstockError, match="spaces"):
        acl_rules("viewer", "a b")


def test_no_rule_grants_a_category_or_all_commands():
    for role in _WRITE_RULES:
        assert not any(
            token.startswith(("+@", "allcommands", "allkeys", "nopass")) for token in acl_rules(role, "demo")
        )
    assert STAGES == ("prompts", "groups", "scored")


def test_the_page_lists_every_user_and_an_actual_line():
    text = (LUA.parents[1] / "docs" / "redis.md").read_text()
    assert re.findall(r"^\| `RUN-(\w+)`", text, re.MULTILINE) == list(ACL_ROLES)
    (line,) = re.findall(r"^(user demo-score .*) \.\.\.$", text, re.MULTILINE)
    assert aclfile_line("score", "demo").startswith(line)
