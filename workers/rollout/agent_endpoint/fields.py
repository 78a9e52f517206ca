"""Every field of a request in the three dialects: honoured, refused or ignored, each with its reason.

The table of docs/agents.md is made of it. A field that stands nowhere is ignored and named once: programs gain fields
weekly, and most of them change nothing that is trained.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from workers.rollout.agent_endpoint.neutral import RequestRefusedError


class FieldUse(StrEnum):
    """The effect of a field."""

    HONOURED = "honoured"
    REFUSED = "refused"
    IGNORED = "ignored"


class FieldRule(NamedTuple):
    """The rule for one field."""

    use: FieldUse
    why: str = ""
    accepts: Callable[[Any], bool] = lambda _: False
    """Values of a refused field that change nothing, and so are not refused."""


def _honoured(why: str) -> FieldRule:
    return FieldRule(FieldUse.HONOURED, why)


def _refused(why: str, accepts: Callable[[Any], bool] = lambda _: False) -> FieldRule:
    return FieldRule(FieldUse.REFUSED, why, accepts)


def _ignored(why: str) -> FieldRule:
    return FieldRule(FieldUse.IGNORED, why)


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, Mapping) else value


def _is_free_choice(value: Any) -> bool:
    return _type_of(value) in ("auto", "none")


def _is_plain_text(value: Any) -> bool:
    return isinstance(value, Mapping) and _type_of(value.get("format")) in (None, "text")


def _keeps_all(value: Any) -> bool:
    edits = value.get("edits", []) if isinstance(value, Mapping) else [value]
    return isinstance(edits, list) and all(isinstance(edit, Mapping) and edit.get("keep") == "all" for edit in edits)


_RUNS_OWN: Final = _ignored("the run's: all rows are of one distribution")
_FOR_ITS_VENDOR: Final = _ignored("of the vendor's service; it changes no token")
_ANSWER_LIMIT: Final = _honoured("the smaller of it and `rollout.max_tokens_per_turn`")
_TOOL_CHOICE: Final = _refused(
    "a forced call is no sample of the policy; `auto` and `none` are honoured", _is_free_choice
)
_FORMAT: Final = "constrained tokens are no sample of the policy"
_STATELESS: Final = "nothing is stored here; send the whole conversation"
_STREAM: Final = _honoured("the answer as server-sent events")
_TOOLS: Final = _honoured("functions; tools that the vendor runs itself are left out")
_ONE_CALL: Final = _honoured("false: only the first call is in the answer; the others stay in the tokens")
_SPENDING: Final = _ignored("the model reasons as much as it does")

FIELDS: Final[Mapping[str, Mapping[str, FieldRule]]] = {
    "chat": {
        "messages": _honoured("the whole conversation"),
        "tools": _TOOLS,
        "tool_choice": _TOOL_CHOICE,
        "parallel_tool_calls": _ONE_CALL,
        "stream": _STREAM,
        "stream_options": _honoured("`include_usage`"),
        "max_tokens": _ANSWER_LIMIT,
        "max_completion_tokens": _ANSWER_LIMIT,
        "stop": _honoured("texts that end the answer"),
        "n": _refused("one answer to a request", lambda value: value == 1),
        "response_format": _refused(_FORMAT, lambda value: _type_of(value) == "text"),
        "logit_bias": _refused("`rollout.sampling.logit_bias` sets it for all rows", lambda value: not value),
        "logprobs": _refused("log-probs are recorded, and not given to the program", lambda value: not value),
        "top_logprobs": _refused("log-probs are recorded, and not given to the program", lambda value: not value),
        "functions": _refused("the form before `tools`"),
        "function_call": _refused("the form before `tool_choice`"),
        "prediction": _refused(_FORMAT),
        "audio": _refused("the model answers text"),
        "modalities": _refused("the model answers text", lambda value: value == ["text"]),
        **dict.fromkeys(
            ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"), _RUNS_OWN
        ),
        "model": _ignored("there is one: the policy"),
        **dict.fromkeys(("reasoning_effort", "verbosity"), _SPENDING),
        **dict.fromkeys(
            ("metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key",
             "prompt_cache_retention",
             "prompt_cache_options", "moderation", "web_search_options"),
            _FOR_ITS_VENDOR,
        ),
    },
    "responses": {
        "input": _honoured("the whole conversation"),
        "instructions": _honoured("a system message before it"),
        "tools": _honoured("functions and namespaces of functions; tools that the vendor runs itself are left out"),
        "tool_choice": _TOOL_CHOICE,
        "parallel_tool_calls": _ONE_CALL,
        "stream": _STREAM,
        "max_output_tokens": _ANSWER_LIMIT,
        "text": _refused(_FORMAT, _is_plain_text),
        "previous_response_id": _refused(_STATELESS),
        "conversation": _refused(_STATELESS),
        "background": _refused(_STATELESS, lambda value: not value),
        "prompt": _refused("templates of prompts are the vendor's"),
        "top_logprobs": _refused("log-probs are recorded, and not given to the program", lambda value: not value),
        "truncation": _refused("nothing is left out of a context", lambda value: value == "disabled"),
        "context_management": _refused("nothing is left out of a context", lambda value: not value),
        "max_tool_calls": _refused("it limits tools that the vendor runs itself"),
        "temperature": _RUNS_OWN,
        "top_p": _RUNS_OWN,
        "model": _ignored("there is one: the policy"),
        "reasoning": _SPENDING,
        **dict.fromkeys(
            ("metadata", "client_metadata", "user", "store", "include", "service_tier", "safety_identifier",
             "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "moderation", "image",
             "access_programs", "background_options", "stream_options"),
            _FOR_ITS_VENDOR,
        ),
    },
    "messages": {
        "messages": _honoured("the whole conversation; `system` within it, too"),
        "system": _honoured("a system message before it; a block of the program's billing is left out"),
        "tools": _TOOLS,
        "tool_choice": _TOOL_CHOICE,
        "stream": _STREAM,
        "max_tokens": _ANSWER_LIMIT,
        "stop_sequences": _honoured("texts that end the answer"),
        "output_config": _refused(_FORMAT + "; `effort` is ignored", _is_plain_text),
        "output_format": _refused(_FORMAT),
        "context_management": _refused("nothing is left out of a context; `keep: all` is honoured", _keeps_all),
        "compaction": _refused("nothing is left out of a context"),
        "thread": _refused(_STATELESS),
        "container": _refused("the vendor's"),
        "mcp_servers": _refused("the vendor's"),
        **dict.fromkeys(("temperature", "top_p", "top_k"), _RUNS_OWN),
        "model": _ignored("there is one: the policy"),
        "thinking": _SPENDING,
        **dict.fromkeys(
            ("metadata", "service_tier", "betas", "cache_control", "inference_geo", "speed", "diagnostics",
             "workspace_id", "user_profile_id", "billing_policy", "fallbacks", "fallback_credit_token"),
            _FOR_ITS_VENDOR,
        ),
    },
}  # fmt: skip
"""Rules by the name of the dialect, then by the field."""


def check_fields(body: Mapping[str, Any], dialect: str) -> tuple[str, ...]:
    """Return the fields of a request that stand in no table.

    Raises:
        RequestRefusedError: a field is refused.
    """
    rules, unknown = FIELDS[dialect], []
    for name, value in body.items():
        rule = rules.get(name)
        if rule is None:
            unknown.append(name)
        elif rule.use is FieldUse.REFUSED and value is not None and not rule.accepts(value):
            raise RequestRefusedError(f"{name}: {rule.why}", name)
    return tuple(unknown)
