"""Types and predicates of the environment contract. The table of members is in the docstring of `envs`."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from stream.errors import EnvironmentFailure, ReferenceNotFoundError

__all__ = (
    "RESERVED_METHODS",
    "AgentEnvironment",
    "Environment",
    "EnvironmentFailure",
    "Observation",
    "Response",
    "ToolError",
    "declares_tools",
    "has_effects",
    "is_content_parts",
    "is_done",
    "is_messages",
    "is_observation",
    "is_replayable",
    "is_response",
    "names_sandboxes",
    "offers_render",
    "offers_rows",
    "stated_timeout_s",
    "states_timeouts",
)

RESERVED_METHODS = frozenset({"reset", "respond", "get_reward", "close"})
"""Public methods that the pipeline calls itself. Every other public method is a tool, except `rows` (`offers_rows`) and
`render` (`offers_render`)."""

Observation = str | list[dict[str, Any]] | None
"""What `reset` returns: text or content parts, appended to the last prompt message; messages with roles, which follow
the prompt; or None for no observation."""

Response = str | list[dict[str, Any]] | None
"""What `respond` returns: text or content parts, which become a user message; messages with roles, none of them the
model's; or None to end the episode."""


@runtime_checkable
class Environment(Protocol):
    """The minimal environment: an object with a `reset` method.

    Example::

        class Echo:
            def reset(self, word, **row):
                self.word, self.heard = word, ""
                return f"Say {word}."

            def say(self, text: str) -> str:
                "Say something."
                self.heard = text
                return text

            def get_reward(self):
                return float(self.heard == self.word)
    """

    @property
    def reset(self) -> Callable[..., Any]:
        """A method that receives the prompt's fields as keyword arguments: all if it has `**row`, else those it names.

        Sync or async. It is a property here since a type checker takes no method for a variable.
        """


def is_observation(value: object) -> bool:
    """Return whether `reset` may return this value."""
    return value is None or isinstance(value, str) or value == [] or is_messages(value) or _are_parts(value)


def is_messages(value: object) -> bool:
    """Return whether a value is a non-empty list of chat messages, each with a role and with content or tool calls."""
    return isinstance(value, list) and bool(value) and all(_is_message(message) for message in value)


def is_response(value: object) -> bool:
    """Return whether `respond` may return this value."""
    if value is None or isinstance(value, str):
        return True
    if is_messages(value):
        messages = cast("list[dict[str, Any]]", value)
        return all(m["role"] not in ("assistant", "tool") and m.get("content") is not None for m in messages)
    return bool(value) and _are_parts(value)


def is_done(env: object) -> bool:
    """Return whether an environment has ended its episode: its attribute or property `done` is true.

    A method `done` is a tool, and a number or a list of that name means something else.
    """
    done = getattr(env, "done", False)
    return type(done).__name__ in ("bool", "bool_") and bool(done)  # numpy's bool counts, too


def offers_rows(env: object) -> bool:
    """Return whether an environment provides rows: a method `rows` that can be called without arguments.

    One with another required parameter is a tool, for example `rows(sheet)` of a spreadsheet.
    """
    return callable(getattr(type(env), "rows", None)) and _required(getattr(env, "rows", None)) in ([], ["split"])


def names_sandboxes(env: object) -> bool:
    """Return whether an environment opens sandboxes: its `reset` has a parameter `sandboxes` (`EpisodeSandboxes`)."""
    try:
        return "sandboxes" in inspect.signature(getattr(env, "reset")).parameters  # noqa: B009  (not known to have one)
    except (TypeError, ValueError):  # a C function without a signature
        return False


def states_timeouts(env: object) -> bool:
    """Return whether an environment's class states how long its calls, or its episodes, may take."""
    return hasattr(type(env), "timeouts_s") or hasattr(type(env), "episode_timeout_s")


def stated_timeout_s(env: object, call: str, default: float) -> float:
    """Return the deadline of a call, in seconds.

    Args:
        env: an environment; its attribute or property `timeouts_s` is a mapping of calls to seconds.
        call: name of the method: a tool, `reset`, `respond` or `get_reward`.
        default: of calls that the mapping does not have.
    """
    timeouts = getattr(env, "timeouts_s", None)
    return float(timeouts.get(call, default)) if isinstance(timeouts, Mapping) else default


def offers_render(env: object) -> bool:
    """Return whether an environment renders snapshots for people: a method `render` that needs `snapshot` alone.

    It returns a string. `snapshot` is the thawed environment, and so is `self`; a static method will do. One without
    that parameter is a tool.
    """
    return callable(getattr(type(env), "render", None)) and _required(getattr(env, "render", None)) == ["snapshot"]


def is_replayable(env: object) -> bool:
    """Return whether the same seed and the same calls have the same results: the class attribute `replayable`.

    Raises:
        ReferenceNotFoundError: it is neither True nor False.
    """
    return _declared(env, "replayable", {True: True, False: False})


def has_effects(env: object) -> bool:
    """Return whether calls change something outside, so that none may be made twice: `effects = "external"`.

    Raises:
        ReferenceNotFoundError: it is neither "external" nor "none".
    """
    return _declared(env, "effects", {"external": True, "none": False})


def _declared(env: object, name: str, values: Mapping[Any, bool]) -> bool:
    """Return what a class attribute declares; False if there is none, or if it is a method, which is a tool."""
    value = getattr(type(env), name, None)
    if value is None or callable(value) or isinstance(value, property):
        return False
    if isinstance(value, str | bool) and value in values:
        return values[value]
    known = " or ".join(repr(each) for each in values)
    raise ReferenceNotFoundError(f"{type(env).__qualname__}.{name} is {value!r}; it has to be {known}")


def _required(method: object) -> list[str] | None:
    """Return the names of the parameters that a call must give; None if that is not known."""
    if not callable(method):
        return None
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # a C function without a signature
        return None
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (_are_parts(content) if content is not None else bool(value.get("tool_calls")))


def _are_parts(value: object) -> bool:
    """Return whether a value is a list of content parts, each with a type or at least a text."""
    return isinstance(value, list) and all(
        isinstance(part, dict) and "role" not in part and isinstance(part.get("type", part.get("text")), str)
        for part in value
    )


_PART_TYPES = ("text", "image", "image_url")


def is_content_parts(value: object) -> bool:
    """Return whether a tool's result is a non-empty list of content parts (text, image, image_url)."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, dict) and part.get("type") in _PART_TYPES for part in value)
        and all(isinstance(part.get("text"), str) for part in value if part["type"] == "text")
    )


def declares_tools(env: object) -> bool:
    """Return whether an environment lists its own tools, as a client of a tool server does; its methods are not tools.

    Such a class has two methods, sync or async: `tool_schemas()`, called once at start-up, returns tools in OpenAI's
    form; `call_tool(name, arguments)` returns a result or raises, as a tool does. A class with only one of them has
    that method as an ordinary tool.
    """
    cls = type(env)
    return callable(getattr(cls, "tool_schemas", None)) and callable(getattr(cls, "call_tool", None))


class AgentEnvironment(ABC):
    """An environment with its own agent loop: it requests each model turn from an OpenAI-compatible endpoint.

    The rollout worker serves that endpoint for one episode and records the sampled tokens and their contexts itself,
    so tokens never have to be trusted from outside. Derive from this class; `reset` is required as in every
    environment.
    """

    @abstractmethod
    async def run_episode(self, endpoint: str, sampling: dict[str, Any]) -> None:
        """Run one episode to its end.

        Args:
            endpoint: base URL, `http://host:port/SECRET/v1`; `POST {endpoint}/chat/completions` samples one turn.
            sampling: `temperature` and `max_tokens` of each turn, from the settings; `context_length`, tokens that an
                engine takes, if it is known.

        Raises:
            EnvironmentFailure: the episode failed for a reason other than the policy; the completion is invalid.
        """


class ToolError(Exception):
    """A tool's error message from a server; the model reads it as the tool's result."""
