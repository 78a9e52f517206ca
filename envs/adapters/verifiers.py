"""Environment servers of verifiers 0.4, over their own protocol; verifiers itself is not imported.

Such a server runs whole episodes: a request contains a task and a model endpoint, and traces stream back. So the
adapter is an `AgentEnvironment`: the endpoint is the rollout worker's own, which records tokens and log-probs as they
are sampled; only rewards and their validity are read from the traces.

The server writes 0.0 in many cases where nothing was measured (an error of the model's server, a scoring timeout), so a
reward counts only if the rest of the trace confirms it: see `read_rewards`.

A message has three ZMQ frames: the request's id, the kind of message, and its data in msgpack.

::

    DEALER ->  [id, b"run", {"task_data", "client", "model", "sampling"}]       or b"health", b"cancel"
           <-  [id, b"delta", {"trace", "open" | "set" | "nodes" | "discard" ...}]     while the episode runs
           <-  [id, b"reply", {"success", "error", "head": {"ok", "is_timeout", ...}, "traces": [{"id", ...}]}]
"""

import math
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import anyio
import msgspec

from envs.contract import AgentEnvironment
from envs.references import import_extra
from stream.errors import EnvironmentFailure
from stream.validity import Reward, RewardReason, Unmeasured, measure

_NO_KEY = "PENSTOCK_HAS_NO_KEY"
"""Environment variable from which the server reads the endpoint's key. It is unset: the endpoint's URL is secret."""

_NOT_TASK = ("seed", "completion_seed", "completion_index", "environment")
"""Arguments of `reset` that are not fields of the task."""


class VerifiersServer(AgentEnvironment):
    """Plays the episodes of a verifiers environment server, one at a time.

    Args:
        address: address of the server, `tcp://host:port`.
        task: fields added to every task.
        nulls: names of task fields whose value is null, which TOML cannot express.
        prompt: whether the row's prompt is the task's prompt. Otherwise the task's prompt is null, and the environment
            starts the conversation.
        column: column with a complete task as verifiers serializes it; other columns of such a row are ignored.
        health_timeout_s: deadline of the server's health check in `reset`.

    Attributes:
        rewards: score times weight, by reward name; None for a reward that was not scored.
        trace: summary of the episode: `ok`, `is_timeout`, `stop_condition`, `errors`, `metrics`.
    """

    def __init__(
        self,
        address: str,
        task: Mapping[str, Any] = MappingProxyType({}),
        *,
        nulls: Sequence[str] = (),
        prompt: bool = True,
        column: str = "task",
        health_timeout_s: float = 10.0,
    ) -> None:
        import_extra("zmq", "verifiers")
        self.address = address
        self.task: dict[str, Any] = {}
        self.trace: dict[str, Any] = {}
        self.rewards: dict[str, float | None] = {}
        self._constant = dict(task) | dict.fromkeys(nulls)
        self._prompt = prompt
        self._column = column
        self._health_timeout_s = health_timeout_s
        self._measured_rewards: dict[str, Reward] = {}

    async def reset(self, **row: Any) -> None:
        """Build the row's task, and check that the server answers.

        Raises:
            EnvironmentFailure: the server does not answer.
        """
        complete_task = row.get(self._column)
        fields = {name: value for name, value in row.items() if name not in _NOT_TASK}
        if not self._prompt:
            fields["prompt"] = None
        self.task = self._constant | (dict(complete_task) if isinstance(complete_task, Mapping) else fields)
        self.trace, self.rewards = {}, {}
        self._measured_rewards = {"verifiers": Unmeasured(RewardReason.MISSING, "the episode did not end")}
        with anyio.move_on_after(self._health_timeout_s):
            async with open_connection(self.address) as socket:
                await socket.request(b"health", {})
                return
        raise EnvironmentFailure(f"no environment server answers at {self.address} within {self._health_timeout_s:g} s")

    async def run_episode(self, endpoint: str, sampling: dict[str, Any]) -> None:
        """Let the server run the episode.

        Raises:
            EnvironmentFailure: the server reports a failure.
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
            raise EnvironmentFailure(f"the environment server at {self.address} reports: {reply.get('error')}")
        self.trace = _trace_summary(reply, traces)
        self._measured_rewards = read_rewards(reply, traces)
        for trace in traces:
            self.rewards.update(
                {name: _weighted_score(reward) for name, reward in (trace.get("rewards") or {}).items()}
            )

    def get_reward(self) -> dict[str, Reward]:
        """Return the rewards of the last episode by name, each measured or with the reason why not."""
        return self._measured_rewards


def read_rewards(reply: Mapping[str, Any], traces: list[dict[str, Any]]) -> dict[str, Reward]:
    """Return the rewards of an episode by name.

    They count as measured only if the episode and its single trace are complete, ok and not timed out, the model had a
    turn, and no reward is missing or not finite.

    Args:
        reply: the server's final message.
        traces: the streamed traces.
    """
    head: Mapping[str, Any] = reply.get("head") or {}
    problem = _find_problem(reply, head, traces)
    if problem:
        return {"verifiers": Unmeasured(RewardReason.RAISED, problem)}
    (trace,) = traces
    if trace.get("is_timeout") or head.get("is_timeout"):
        return {"verifiers": Unmeasured(RewardReason.TIMEOUT, "a stage of the episode timed out")}
    rewards = trace.get("rewards") or {}
    if not rewards:
        return {"verifiers": Unmeasured(RewardReason.MISSING, "the episode has no reward")}
    return {name: measure(_weighted_score(reward)) for name, reward in rewards.items()}


def _find_problem(reply: Mapping[str, Any], head: Mapping[str, Any], traces: list[dict[str, Any]]) -> str:
    """Return what is wrong with an episode; empty if nothing is, or if it timed out."""
    if len(traces) != 1:
        return f"the episode has {len(traces)} traces; expected one, of a single agent"
    (trace,) = traces
    if len(trace["nodes"]) != reply["traces"][0].get("nodes"):
        return "part of the trace is missing"
    if head.get("is_timeout") or trace.get("is_timeout"):
        return ""  # reported by its own reason
    if not (head.get("ok") and trace.get("ok")):
        errors = [*(head.get("errors") or ()), *trace["errors"]]
        return "; ".join(f"{e.get('type')}: {e.get('message')}" for e in errors) or "the episode failed"
    if not any(call.get("error") is None for call in trace["calls"]):
        return "the model had no turn"
    return ""


def _weighted_score(reward: Any) -> float | None:
    """Return score times weight of a reward; None if it was not scored."""
    if not isinstance(reward, Mapping):
        return None
    score, weight = reward.get("score"), reward.get("weight", 1.0)
    return None if score is None or weight is None else float(score) * float(weight)


def _trace_summary(reply: Mapping[str, Any], traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of an episode that people and reward functions read (`VerifiersServer.trace`)."""
    head = reply.get("head") or {}
    trace = traces[0] if traces else {}
    summary: dict[str, Any] = {"ok": bool(head.get("ok") and trace.get("ok")), "is_timeout": False}
    summary["is_timeout"] = bool(head.get("is_timeout") or trace.get("is_timeout"))
    summary["errors"] = [str(e.get("message")) for e in [*(head.get("errors") or ()), *trace.get("errors", ())]]
    metrics: Mapping[str, Any] = trace.get("metrics") or {}
    summary["metrics"] = {
        name: value for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    return summary | {"stop_condition": trace.get("stop_condition"), "info": trace.get("info") or {}}


_LINGER_MS = 1000
"""Time for sending pending messages, such as a cancel, after the socket is closed."""
_CANCEL_S = 5.0
"""Time for queueing a cancel, which blocks only if about a thousand messages are queued already."""
_encode = msgspec.msgpack.encode


class Connection:
    """A connection to a server, for one request."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    async def request(self, method: bytes, payload: object) -> dict[str, Any]:
        """Send a request that has a single reply, and return its data."""
        request_id = await self._send(method, payload)
        while True:
            kind, data = await self._receive(request_id)
            if kind == b"reply":
                return data

    async def run_episode(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Run an episode; return the final reply, and its traces in order. If cancelled, stop it on the server, too."""
        traces: dict[str, dict[str, Any]] = {}
        request_id = await self._send(b"run", request)
        try:
            while True:
                kind, data = await self._receive(request_id)
                if kind == b"reply":
                    listed = [traces.get(summary["id"]) for summary in data.get("traces") or ()]
                    return data, [trace for trace in listed if trace is not None]
                _apply_delta(data, traces)
        except BaseException:
            with anyio.move_on_after(_CANCEL_S, shield=True):
                await self._send(b"cancel", {"request_id": request_id.decode()})
            raise

    async def _send(self, method: bytes, payload: object) -> bytes:
        request_id = uuid.uuid4().hex.encode()
        await self._socket.send_multipart([request_id, method, _encode(payload)])
        return request_id

    async def _receive(self, request_id: bytes) -> tuple[bytes, dict[str, Any]]:
        """Wait for the next message of a request; return its kind and data.

        Raises:
            EnvironmentFailure: the message does not follow the protocol.
        """
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3:
                raise EnvironmentFailure(f"{len(frames)} frames from the environment server; verifiers 0.4 sends 3")
            if frames[0] != request_id:
                continue
            try:
                data = msgspec.msgpack.decode(frames[2])
            except (ValueError, TypeError) as error:
                raise EnvironmentFailure(f"the environment server sent an invalid message: {error}") from error
            if not isinstance(data, dict):
                raise EnvironmentFailure(f"the environment server sends a {type(data).__name__}, not a map")
            return frames[1], data


@asynccontextmanager
async def open_connection(address: str) -> AsyncIterator[Connection]:
    """Open a connection. ZMQ does not report whether a server is listening."""
    zmq = import_extra("zmq.asyncio", "verifiers")
    socket = zmq.Context.instance().socket(import_extra("zmq", "verifiers").DEALER)
    try:
        socket.connect(address)
        yield Connection(socket)
    finally:
        socket.close(linger=_LINGER_MS)


def _apply_delta(delta: Mapping[str, Any], traces: dict[str, dict[str, Any]]) -> None:
    """Apply an update to a trace: nodes, calls and errors are appended, other fields replaced."""
    name = str(delta.get("trace"))
    if delta.get("discard"):
        traces.pop(name, None)
        return
    trace = traces.setdefault(name, {"nodes": [], "calls": [], "errors": []})
    for field in ("nodes", "calls", "errors"):
        trace[field] += delta.get(field) or ()
    trace.update(delta.get("set") or {})
