"""Gymnasium environments as text, with the user's codec: parse actions, render observations.

::

    [environments.lake]
    ref = "gymnasium"
    args = { id = "FrozenLake-v1", make = { render_mode = "ansi", is_slippery = false }, parse_action = "lake.py:parse",
             render = "lake.py:render", how = "left, down, right or up" }

The model acts through one tool, `act(action)`. It reads the error if `parse_action` raises or if the action is not in
the action space; the environment is not called then. An exception from the environment makes the episode invalid.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from envs.adapters.step_rewards import AggregationMethod, NoStep, RewardAggregation
from envs.call import describe_error, filter_kwargs
from envs.references import import_extra, resolve
from stream.errors import EnvironmentFailure, ReferenceNotFoundError
from stream.validity import Unmeasured

Codec = Callable[..., Any]


class GymnasiumText:
    """A Gymnasium environment with a text codec. Its methods are synchronous and run in threads.

    Args:
        id: id of a registered environment; `module:Name-v0` imports the module first.
        parse_action: function, or reference to one, that turns the model's text into an action. If it raises, the model
            reads the error.
        render: function, or reference to one, that returns the text that the model reads. Its parameters may be any of
            `observation`, `reward`, `terminated`, `truncated`, `info` and `env`. Default: the environment's own
            `render()`, which must return text (`render_mode = "ansi"`).
        make: keyword arguments for `gymnasium.make`.
        how: description of an action, for the tool's schema.
        reward: how the steps' rewards become the episode's: `sum`, `last` or `max`.
        no_step: reward of an episode without a step: a number or `invalid`. For `sum` the default is 0.0; `last` and
            `max` have no default.

    Attributes:
        rewards: reward of each step.
        terminated: whether the environment reached a final state.
        truncated: whether the environment cut the episode short, for example by a time limit.
    """

    def __init__(
        self,
        id: str,  # noqa: A002  (Gymnasium's word)
        parse_action: str | Codec,
        render: str | Codec | None = None,
        make: Mapping[str, Any] = MappingProxyType({}),
        how: str = "the action",
        reward: AggregationMethod = "sum",
        no_step: NoStep | None = None,
    ) -> None:
        self.id = id
        self.aggregation = RewardAggregation.from_options(reward, no_step)
        self.observation: Any = None
        self.actions: list[Any] = []
        self.rewards: list[float] = []
        self.terminated = self.truncated = False
        self._how = how
        self._parse = _load_function(parse_action)
        self._render = _load_function(render) if render is not None else _render_ansi
        self._env: Any = import_extra("gymnasium", "gymnasium").make(id, **make)

    @property
    def done(self) -> bool:
        """Whether the episode is over, so that the model gets no further turn."""
        return self.terminated or self.truncated

    def __copy__(self) -> "GymnasiumText":
        """Copy the data without the environment, which a copy would share."""
        copied = object.__new__(type(self))
        handles = {"_env", "_parse", "_render"}
        copied.__dict__.update({name: value for name, value in vars(self).items() if name not in handles})
        return copied

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the schema of the tool `act`, in OpenAI's format."""
        action = {"type": "string", "description": self._how}
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        act = {"name": "act", "description": "Take one step in the environment.", "parameters": parameters}
        return [{"type": "function", "function": act}]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> str:
        """Start an episode, and return its first observation. A group has one seed, so its episodes start alike."""
        self.actions, self.rewards, self.terminated, self.truncated = [], [], False, False
        self.observation, info = self._env.reset(seed=seed, options=options)
        return self._render_text(None, info)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Take one step, and return the text that the model reads.

        Raises:
            ValueError: the text is not a valid action, or the episode is over; the model reads the message.
            EnvironmentFailure: the environment raised.
        """
        text = arguments.get("action")
        if not isinstance(text, str) or set(arguments) != {"action"}:
            raise ValueError(f"{name} takes one argument, action, a string: {self._how}")
        if self.terminated or self.truncated:
            raise ValueError("the episode is over")
        action = self._parse(text)
        if not self._env.action_space.contains(action):
            raise ValueError(f"{text!r} is not a valid action; {self._how}")
        self.actions.append(action)
        try:
            self.observation, reward, terminated, truncated, info = self._env.step(action)
        except Exception as error:
            raise EnvironmentFailure(f"{self.id}: step({action!r}) raised {describe_error(error)}") from error
        self.rewards.append(float(reward))
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        return self._render_text(float(reward), info)

    def get_reward(self) -> float | Unmeasured:
        """Return the aggregated reward of the steps."""
        return self.aggregation.aggregate(self.rewards)

    def sample_rewards(self, count: int) -> list[float]:
        """Take up to `count` random actions after a reset, and return their rewards; for `penstock check`."""
        rewards: list[float] = []
        is_over = False
        while len(rewards) < count and not is_over:
            _, reward, terminated, truncated, _ = self._env.step(self._env.action_space.sample())
            rewards.append(float(reward))
            is_over = bool(terminated or truncated)
        return rewards

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _render_text(self, reward: float | None, info: dict[str, Any]) -> str:
        available = {
            "observation": self.observation,
            "reward": reward,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "info": info,
            "env": self._env,
        }
        try:
            return str(self._render(**filter_kwargs(self._render, available)))
        except Exception as error:
            raise EnvironmentFailure(f"{self.id}: rendering raised {describe_error(error)}") from error


def _load_function(function: str | Codec) -> Codec:
    """Return one of the codec's functions, given directly or by reference.

    Raises:
        ReferenceNotFoundError: the reference does not resolve, or not to a callable.
    """
    target = resolve(function, None).target if isinstance(function, str) else function
    if not callable(target):
        raise ReferenceNotFoundError(f"{function!r} is of type {type(target).__name__}, not a function")
    return target


def _render_ansi(env: Any) -> str:
    text = env.render()
    if not isinstance(text, str):
        raise TypeError(
            f"render() returned {type(text).__name__} instead of text: set make.render_mode to 'ansi', or set render"
        )
    return text
