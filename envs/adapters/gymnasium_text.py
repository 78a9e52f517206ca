"""Gymnasium environments as text: what an action looks like, and what the model reads, is a codec of the user's.

::

    [environments.lake]
    ref = "gymnasium"
    args = { id = "FrozenLake-v1", make = { render_mode = "ansi", is_slippery = false }, parse_action = "lake.py:parse",
             render = "lake.py:render", how = "left, down, right or up" }

The model acts by one tool, `act(action)`. What `parse_action` raises, and an action outside of the action space, is
told to the model; the environment sees neither. What the environment itself raises makes the episode invalid.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from envs.call import describe_error, filter_kwargs
from envs.extras import import_extra
from envs.references import resolve
from stream.errors import EnvironmentFailure, ReferenceNotFoundError

Codec = Callable[..., Any]


class GymnasiumText:
    """A Gymnasium environment with a text codec. Its methods are synchronous, and so run in threads.

    Args:
        id: of a registered environment; `module:Name-v0` imports the module first.
        parse_action: from the model's text to an action, or a reference to such a function; raises what the model is
            to read.
        render: from `observation`, `reward`, `terminated`, `truncated`, `info` and `env`, as many as it names, to what
            the model reads, or a reference to such a function. Without it the environment's own `render()`, which has
            to give text (`render_mode = "ansi"`).
        make: keyword arguments for `gymnasium.make`.
        how: what an action looks like, for the tool's description.
        reward: what becomes of the steps' rewards: their `sum` (0 where the model took no step: that is what such an
            episode returns), or the `last`.

    Attributes:
        rewards: of each step.
        terminated: the environment reached an end of its own.
        truncated: it was cut short, by a time limit for one.
    """

    def __init__(
        self,
        id: str,  # noqa: A002  (Gymnasium's word)
        parse_action: str | Codec,
        render: str | Codec | None = None,
        make: Mapping[str, Any] = MappingProxyType({}),
        how: str = "the action",
        reward: Literal["sum", "last"] = "sum",
    ) -> None:
        if reward not in ("sum", "last"):
            raise ReferenceNotFoundError(f"reward = {reward!r}; it may be 'sum' or 'last'")
        self.id = id
        self.observation: Any = None
        self.actions: list[Any] = []
        self.rewards: list[float] = []
        self.terminated = self.truncated = False
        self._how = how
        self._reward_of = reward
        self._parse = _load_function(parse_action)
        self._render = _load_function(render) if render is not None else _render_ansi
        self._env: Any = import_extra("gymnasium", "gymnasium").make(id, **make)

    def __copy__(self) -> "GymnasiumText":
        """The facts, without the environment: a copy of a wrapper would share what it wraps."""
        facts = object.__new__(type(self))
        handles = {"_env", "_parse", "_render"}
        facts.__dict__.update({name: value for name, value in vars(self).items() if name not in handles})
        return facts

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The one tool."""
        action = {"type": "string", "description": self._how}
        shape = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        act = {"name": "act", "description": "Take one step in the environment.", "parameters": shape}
        return [{"type": "function", "function": act}]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> str:
        """Begin an episode: with the completion's seed, unless the row has a column `seed` (all siblings alike)."""
        self.actions, self.rewards, self.terminated, self.truncated = [], [], False, False
        self.observation, info = self._env.reset(seed=seed, options=options)
        return self._render_text(None, info)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Act.

        Raises:
            ValueError: the text is no action, or the episode is over; for the model to read.
            EnvironmentFailure: the environment raised.
        """
        text = arguments.get("action")
        if not isinstance(text, str) or set(arguments) != {"action"}:
            raise ValueError(f"{name} takes one argument, action, a string: {self._how}")
        if self.terminated or self.truncated:
            raise ValueError("the episode is over")
        action = self._parse(text)
        if not self._env.action_space.contains(action):
            raise ValueError(f"{text!r} is no action here; {self._how}")
        self.actions.append(action)
        try:
            self.observation, reward, terminated, truncated, info = self._env.step(action)
        except Exception as error:
            raise EnvironmentFailure(f"{self.id}: step({action!r}) raised {describe_error(error)}") from error
        self.rewards.append(float(reward))
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        return self._render_text(float(reward), info)

    def get_reward(self) -> float | None:
        """What the steps were worth."""
        if self._reward_of == "last":
            return self.rewards[-1] if self.rewards else None
        return float(sum(self.rewards))

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _render_text(self, reward: float | None, info: dict[str, Any]) -> str:
        offered = {
            "observation": self.observation,
            "reward": reward,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "info": info,
            "env": self._env,
        }
        try:
            return str(self._render(**filter_kwargs(self._render, offered)))
        except Exception as error:
            raise EnvironmentFailure(f"{self.id}: rendering raised {describe_error(error)}") from error


def _load_function(function: str | Codec) -> Codec:
    """A part of the codec, by itself or by reference.

    Raises:
        ReferenceNotFoundError: it leads nowhere, or to nothing that can be called.
    """
    target = resolve(function, None).target if isinstance(function, str) else function
    if not callable(target):
        raise ReferenceNotFoundError(f"{function!r} is of type {type(target).__name__}, not a function")
    return target


def _render_ansi(env: Any) -> str:
    shown = env.render()
    if not isinstance(shown, str):
        raise TypeError(
            f"render() gave {type(shown).__name__}, no text: make it with render_mode 'ansi', or give render"
        )
    return shown
