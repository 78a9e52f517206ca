"""Profiles of agent programs: what each needs to run in a sandbox against the worker's endpoint.

A profile is plain data. Its texts may name what `AgentProgram` fills in; besides the endpoint and the row's columns:

====================  ==============================================================================================
`{context_length}`    tokens that the engine takes, answer included
`{max_tokens}`        tokens of one answer
`{compact_at}`        a context from which a program that counts by itself is to compact its history
`{max_result}`        tokens of one tool's result
====================  ==============================================================================================

All profiles turn off what would go elsewhere: updates, telemetry, lists of models and plugins. The sandbox refuses it
in any case, but some programs wait for it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct

_UNKNOWN_CONTEXT: Final = 131_072
"""Context length that programs are given if no engine reports one."""
_COMPACT_AT: Final = 0.7
"""Share of the context at which a program compacts. What is left holds a tool's result and an answer."""
_RESULT: Final = 0.1
"""Share of the context that one tool's result may take."""


class ProgramProfile(Struct, frozen=True, kw_only=True):
    """What a program is given, as plain data."""

    executable: str
    """Its name on the PATH."""
    version: str
    """The one that is tested."""
    install: str
    """The command that installs it."""
    arguments: tuple[str, ...]
    """Of the default command; the user's `command` replaces them."""
    env: Mapping[str, str] = MappingProxyType({})
    """Environment variables; the user's `env` is added."""
    stdin: str = ""
    """Text of its standard input."""
    files: Mapping[str, str] = MappingProxyType({})
    """Texts of files, by their path in the program's home."""


def context_values(sampling: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a profile's placeholders.

    Args:
        sampling: as of `AgentEnvironment.run_episode`.
    """
    length = int(sampling.get("context_length") or _UNKNOWN_CONTEXT)
    values = {
        "context_length": length,
        "max_tokens": max(1, min(int(sampling.get("max_tokens") or length), length // 2)),
        "compact_at": max(1, int(length * _COMPACT_AT)),
        "max_result": max(1, int(length * _RESULT)),
    }
    return {name: str(value) for name, value in values.items()}


_CLAUDE_CODE: Final = ProgramProfile(
    executable="claude",
    version="2.1.197",
    install="npm install --global @anthropic-ai/claude-code",
    arguments=(
        *("--print", "--permission-mode", "bypassPermissions"),
        *("--disallowedTools", "WebFetch", "WebSearch"),  # they ask its vendor
        *("--", "{prompt}"),
    ),
    env={
        "ANTHROPIC_BASE_URL": "{base_url}",
        "ANTHROPIC_AUTH_TOKEN": "{key}",
        "ANTHROPIC_MODEL": "policy",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "policy",  # for side calls
        "CLAUDE_CODE_SUBAGENT_MODEL": "policy",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{context_length}",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{max_tokens}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with the first user message
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # else it refuses to run without permissions as root
        "API_TIMEOUT_MS": "3600000",
    },
)

_CODEX: Final = ProgramProfile(
    executable="codex",
    version="0.169.0",
    install="npm install --global @openai/codex",
    arguments=(
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("--", "{prompt}"),
    ),
    env={"CODEX_HOME": "{home}/.codex", "PENSTOCK_KEY": "{key}"},
    files={
        ".codex/config.toml": """\
model = "policy"
model_provider = "penstock"
model_context_window = {context_length}
model_auto_compact_token_limit = {compact_at}
tool_output_token_limit = {max_result}
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.penstock]
name = "penstock"
base_url = "{endpoint}"
env_key = "PENSTOCK_KEY"
wire_api = "responses"
stream_idle_timeout_ms = 3600000

[analytics]
enabled = false

[features]
apps = false
plugins = false

[otel]
metrics_exporter = "none"
"""
    },
)

_OPENCODE: Final = ProgramProfile(
    executable="opencode",
    version="1.18.33",
    install="npm install --global opencode-ai",
    # With a title, it does not ask the model for one. It would put an argument with blanks in quotation marks.
    arguments=("run", "--title", "episode", "--model", "penstock/policy"),
    stdin="{prompt}",
    env={
        "OPENCODE_CONFIG_CONTENT": """\
{
  "model": "penstock/policy",
  "small_model": "penstock/policy",
  "provider": {
    "penstock": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "{endpoint}", "apiKey": "{key}", "timeout": false},
      "models": {"policy": {"tool_call": true, "limit": {"context": {context_length}, "output": {max_tokens}}}}
    }
  },
  "permission": {"*": "allow", "webfetch": "deny", "websearch": "deny"},
  "autoupdate": false,
  "share": "disabled",
  "snapshot": false
}
""",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "npm_config_offline": "true",  # it would install a package for plugins, and wait for that
    },
)

_MINI_SWE_AGENT: Final = ProgramProfile(
    executable="mini",
    version="2.4.6",
    install="pip install mini-swe-agent",
    arguments=("--yolo", "--exit-immediately", "--cost-limit", "0", "--task={prompt}"),
    env={
        "OPENAI_BASE_URL": "{endpoint}",
        "OPENAI_API_BASE": "{endpoint}",
        "OPENAI_API_KEY": "{key}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_MODEL_NAME": "openai/policy",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",  # it repeats also what is refused, for minutes
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
)

PROFILES: Final[Mapping[str, ProgramProfile]] = MappingProxyType(
    {
        "claude-code": _CLAUDE_CODE,
        "codex": _CODEX,
        "opencode": _OPENCODE,
        "mini-swe-agent": _MINI_SWE_AGENT,
    }
)
"""Profiles by their name in a reference, `agent:NAME`."""
