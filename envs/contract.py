"""The words of the environment contract; the table of members is in the package's docstring."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from stream.errors import EnvironmentFailure

__all__ = (
    "RESERVED_METHODS",
    "AgentEnvironment",
    "Environment",
    "EnvironmentFailure",
    "Observation",
    "declares_tools",
    "is_content_parts",
    "is_observation",
)

RESERVED_METHODS = frozenset({"reset", "get_reward", "close"})
"""Public methods that the pipeline calls itself; every other one is a tool."""

Observation = str | list[dict[str, Any]] | None
"""What `reset` returns: appended to the last prompt message, unless it is None."""


@runtime_checkable
class Environment(Protocol):
    """All that is asked of an environment.

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

    reset: Callable[..., Any]
    """Takes the prompt's fields as keyword arguments, as many as it names (all with `**row`); sync or async."""


def is_observation(value: object) -> bool:
    """Whether `reset` may return this."""
    is_parts = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    return value is None or isinstance(value, str) or is_parts


_PART_TYPES = ("text", "image", "image_url")


def is_content_parts(value: object) -> bool:
    """Whether a tool's result is a list of content parts, and no other list of mappings."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, dict) and part.get("type") in _PART_TYPES for part in value)
        and all(isinstance(part.get("text"), str) for part in value if part["type"] == "text")
    )


def declares_tools(env: object) -> bool:
    """Whether it says itself what its tools are, as what speaks for a server must; its methods are then no tools.

    Such a class has both of these, sync or async: `tool_schemas()`, which is called once at start and returns tools in
    OpenAI's form, and `call_tool(name, arguments)`, which answers, or raises, as a tool does. One of them alone is a
    tool like any other method.
    """
    cls = type(env)
    return callable(getattr(cls, "tool_schemas", None)) and callable(getattr(cls, "call_tool", None))


class AgentEnvironment(ABC):
    """An environment that leads the episode itself: it asks an OpenAI-compatible endpoint for every turn of the model.

    The rollout worker serves that endpoint, for this episode alone, from its own engine client: it records the tokens
    that were sampled and what the model saw before each, so that what comes back over the wire is never believed. The
    class derives from this one, since no method's name is free to mean it; it has a `reset` like every environment.
    """

    @abstractmethod
    async def run_episode(self, endpoint: str, sampling: dict[str, Any]) -> None:
        """Play one episode, to its end.

        Args:
            endpoint: base URL, `http://host:port/SECRET/v1`; `POST {endpoint}/chat/completions` samples a turn.
            sampling: `temperature` and `max_tokens` for each turn, as the settings have them.

        Raises:
            EnvironmentFailure: nobody knows what the policy would have done.
        """
