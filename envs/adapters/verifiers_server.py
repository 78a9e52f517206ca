"""Environment servers of verifiers 0.4, over their own wire; verifiers itself stays in its own virtual environment.

Such a server plays whole episodes: a request brings a task and the endpoint of a model, and the traces stream back. So
the adapter is a `Harness`: the endpoint is the rollout worker's own, where tokens and log-probs are recorded as they
are sampled, and of what comes back only the rewards and their standing are read.

The server writes 0.0 in many cases where nothing was measured (an error of the model's server, a scoring that overran),
so a reward counts only if everything around it says that it was: see `verdict`.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import anyio

from envs.adapters.verifiers_wire import open_connection
from envs.contract import AgentEnvironment
from envs.extras import import_extra
from stream.errors import EnvironmentFailure
from stream.validity import Reward, RewardReason, Unmeasured, measure

_NO_KEY = "PENSTOCK_HAS_NO_KEY"
"""The environment variable from which the server takes the endpoint's key: none, since its address is the secret."""

_NOT_TASK = ("seed", "completion_index", "environment")


class VerifiersServer(AgentEnvironment):
    """One episode at a time of a verifiers environment server.

    Args:
        address: of the server, `tcp://host:port`.
        task: fields of every task, beside those of the row.
        nulls: fields of every task that are null, which TOML cannot say.
        prompt: the row's prompt is the task's. Without it the task's is null: the environment itself opens the
            conversation, and the prompt column only names the row.
        column: a column that holds a whole task as verifiers dumps it; a row that has it brings nothing else.
        health_s: within which the server answers that it is there.

    Attributes:
        rewards: by name, each its score times its weight, or None.
        trace: what the server said of the episode: `ok`, `is_timeout`, `stop_condition`, `errors`, `metrics`.
    """

    def __init__(
        self,
        address: str,
        task: Mapping[str, Any] = MappingProxyType({}),
        *,
        nulls: Sequence[str] = (),
        prompt: bool = True,
        column: str = "task",
        health_s: float = 10.0,
    ) -> None:
        import_extra("zmq", "verifiers")
        self.address = address
        self.task: dict[str, Any] = {}
        self.trace: dict[str, Any] = {}
        self.rewards: dict[str, float | None] = {}
        self._constant = dict(task) | dict.fromkeys(nulls)
        self._prompt = prompt
        self._column = column
        self._health_s = health_s
        self._measured_rewards: dict[str, Reward] = {}

    async def reset(self, **row: Any) -> None:
        """Take the row's task, and see that the server is there.

        Raises:
            EnvironmentFailure: it does not answer.
        """
        whole = row.get(self._column)
        fields = {name: value for name, value in row.items() if name not in _NOT_TASK}
        if not self._prompt:
            fields["prompt"] = None
        self.task = self._constant | (dict(whole) if isinstance(whole, Mapping) else fields)
        self.trace, self.rewards = {}, {}
        self._measured_rewards = {"verifiers": Unmeasured(RewardReason.MISSING, "the episode did not come to its end")}
        with anyio.move_on_after(self._health_s):
            async with open_connection(self.address) as socket:
                await socket.request(b"health", {})
                return
        raise EnvironmentFailure(f"no environment server answers at {self.address} within {self._health_s:g} s")

    async def run_episode(self, endpoint: str, sampling: dict[str, Any]) -> None:
        """Have the server play the episode.

        Raises:
            EnvironmentFailure: it says that it could not.
        """
        request = {
            "task_data": self.task,
            "client": {"type": "eval", "base_url": endpoint, "api_key_var": _NO_KEY},
            "model": "policy",
            "sampling": sampling,
        }
        async with open_connection(self.address) as socket:
            reply, traces = await socket.run_episode(request)
        if not reply.get("success"):
            raise EnvironmentFailure(f"the environment server at {self.address} says: {reply.get('error')}")
        self.trace = _trace_summary(reply, traces)
        self._measured_rewards = read_rewards(reply, traces)
        for trace in traces:
            self.rewards.update(
                {name: _weighted_score(reward) for name, reward in (trace.get("rewards") or {}).items()}
            )

    def get_reward(self) -> dict[str, Reward]:
        """What the server measured, by name."""
        return self._measured_rewards


def read_rewards(reply: Mapping[str, Any], traces: list[dict[str, Any]]) -> dict[str, Reward]:
    """What an episode was worth, by the name of each reward, and whether that was measured.

    It was, only if the episode and its one trace are whole, ok and not timed out, the model had a turn, and no reward
    is missing or not finite.

    Args:
        reply: the server's last word.
        traces: as they were streamed, whole.
    """
    head: Mapping[str, Any] = reply.get("head") or {}
    wrong = _find_problem(reply, head, traces)
    if wrong:
        return {"verifiers": Unmeasured(RewardReason.RAISED, wrong)}
    (trace,) = traces
    if trace.get("is_timeout") or head.get("is_timeout"):
        return {"verifiers": Unmeasured(RewardReason.TIMEOUT, "a stage of the episode ran past its deadline")}
    rewards = trace.get("rewards") or {}
    if not rewards:
        return {"verifiers": Unmeasured(RewardReason.MISSING, "the episode has no reward")}
    return {name: measure(_weighted_score(reward)) for name, reward in rewards.items()}


def _find_problem(reply: Mapping[str, Any], head: Mapping[str, Any], traces: list[dict[str, Any]]) -> str:
    if len(traces) != 1:
        return f"the episode has {len(traces)} traces; an episode of one agent is expected"
    (trace,) = traces
    if len(trace["nodes"]) != reply["traces"][0].get("nodes"):
        return "a part of the trace was lost on the way"
    if head.get("is_timeout") or trace.get("is_timeout"):
        return ""  # told by a reason of its own
    if not (head.get("ok") and trace.get("ok")):
        errors = [*(head.get("errors") or ()), *trace["errors"]]
        return "; ".join(f"{e.get('type')}: {e.get('message')}" for e in errors) or "the episode is not ok"
    if not any(call.get("error") is None for call in trace["calls"]):
        return "the model had no turn"
    return ""


def _weighted_score(reward: Any) -> float | None:
    """A reward's score times its weight; None where scoring did not run."""
    if not isinstance(reward, Mapping):
        return None
    score, weight = reward.get("score"), reward.get("weight", 1.0)
    return None if score is None or weight is None else float(score) * float(weight)


def _trace_summary(reply: Mapping[str, Any], traces: list[dict[str, Any]]) -> dict[str, Any]:
    """What people and reward functions may want to know of the episode."""
    head = reply.get("head") or {}
    trace = traces[0] if traces else {}
    facts: dict[str, Any] = {"ok": bool(head.get("ok") and trace.get("ok")), "is_timeout": False}
    facts["is_timeout"] = bool(head.get("is_timeout") or trace.get("is_timeout"))
    facts["errors"] = [str(e.get("message")) for e in [*(head.get("errors") or ()), *trace.get("errors", ())]]
    metrics: Mapping[str, Any] = trace.get("metrics") or {}
    facts["metrics"] = {
        name: value for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    return facts | {"stop_condition": trace.get("stop_condition"), "info": trace.get("info") or {}}
