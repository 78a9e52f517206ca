"""OpenEnv: an environment behind the WebSocket of an unmodified OpenEnv server (`openenv-core` 0.2 and 0.3).

::

    ->  {"type": "reset", "data": {"seed": 7, ...}}
    <-  {"type": "observation", "data": {"observation": {...}, "reward": null, "done": false}}
    ->  {"type": "step", "data": {"type": "call_tool", "tool_name": "echo_message", "arguments": {"message": "hi"}}}
    <-  {"type": "observation", "data": {"observation": {"tool_name": ..., "result": {...}}, "reward": 0.2, ...}}
    <-  {"type": "error", "data": {"message": "...", "code": "EXECUTION_ERROR"}}

A socket on which an exchange did not come to its end is aborted (`openenv_socket.py` says why), the episode is invalid,
and the next reset connects anew. Only `/ws` serves episodes: the HTTP routes make a new environment for each call.

Tools are those of the server's MCP list; a server without one has a single tool, `step`, with its action's schema.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from envs.adapters.openenv_socket import EnvironmentSocket, websocket_url
from envs.call import describe_error
from stream.errors import EnvironmentFailure, ReferenceNotFoundError
from stream.validity import RewardReason, Unmeasured

_STEP = "step"
"""The tool of a server without an MCP list. OpenEnv reserves the name, so that no tool of such a list bears it."""
_MAX_SEED = 2**31
"""Larger ones are refused by some of the random generators behind such servers."""
_MODEL_ERROR_TYPES = frozenset({"execution_error", "invalid_args", "tool_not_found", "timeout"})
"""Errors of a tool that are the model's business; `transport_error` is nobody's."""

RewardAggregation = Literal["sum", "last", "max", "none"]


class ToolError(Exception):
    """What a tool answered in place of a result: text for the model."""


class OpenEnv:
    """An OpenEnv environment whose reward, if it has one, is not asked for: reward functions measure.

    Args:
        url: of the server, `ws://host:port` (or http, wss, https).
        max_message_bytes: the longest answer.

    Attributes:
        calls: the tools called in this episode, with their arguments and what the server answered.
        rewards: of each step, as it came: None where the server sent null, as it does for NaN.
        done: the server said that the episode is over.
    """

    def __init__(self, url: str, max_message_bytes: int = 64 * 1024 * 1024) -> None:
        self.url = websocket_url(url)
        self.observation: Any = None
        self.calls: list[dict[str, Any]] = []
        self.rewards: list[float | None] = []
        self.done = False
        self._broken = ""
        self._max_message_bytes = max_message_bytes
        self._socket: EnvironmentSocket | None = None

    def __copy__(self) -> "OpenEnv":
        """The facts, without the socket."""
        facts = object.__new__(type(self))
        facts.__dict__.update(vars(self) | {"_socket": None})
        return facts

    async def tool_schemas(self) -> list[dict[str, Any]]:
        """Ask the server for its tools, on a connection that is closed again.

        Raises:
            ReferenceNotFoundError: nothing answers there; says how such a server is started.
        """
        try:
            async with EnvironmentSocket.open(self.url, self._max_message_bytes) as socket:
                question = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
                answer = await socket.request({"type": "mcp", "data": question})
                listed = answer.get("result")
                return _mcp_tools(listed["tools"]) if listed else [_step_tool(await socket.action_schema())]
        except EnvironmentFailure as failure:
            raise ReferenceNotFoundError(
                f"no OpenEnv server answers at {self.url}: {failure}. Its tools stand in the prompt, so it has to be "
                "there from the start, e.g. `python -m uvicorn server.app:app --port 8000` in the environment's folder"
            ) from failure

    async def reset(self, **row: Any) -> str | None:
        """Begin an episode; the server takes of the row's fields what its own `reset` names.

        Raises:
            EnvironmentFailure: it cannot be reached, or its reset failed.
        """
        self.observation, self.calls, self.rewards, self.done, self._broken = None, [], [], False, ""
        if self._socket is None or self._socket.is_closed:
            self._socket = await EnvironmentSocket.connect(self.url, self._max_message_bytes)
        answer = await self._exchange({"type": "reset", "data": _json_fields(row)})
        self.done = bool(answer.get("done"))
        self.observation = answer.get("observation") or None
        return _text(self.observation) if self.observation else None

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Take a step.

        Raises:
            ToolError: the tool's error, for the model to read.
            EnvironmentFailure: of the server, or of the way to it.
        """
        if self.done:
            raise ToolError("the episode is over")
        action = arguments if name == _STEP else {"type": "call_tool", "tool_name": name, "arguments": arguments}
        call = {"tool": name, "arguments": arguments, "observation": None}
        self.calls.append(call)
        answer = await self._exchange({"type": "step", "data": action})
        if "errors" in answer:
            raise ToolError(f"the arguments do not fit: {_text(answer['errors'])}")
        self.rewards.append(answer.get("reward"))
        self.done = bool(answer.get("done"))
        call["observation"] = observation = answer.get("observation")
        return _text(observation) if name == _STEP else _tool_result(observation)

    async def close(self) -> None:
        """Close the socket; the server ends its session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._broken:
            raise EnvironmentFailure(self._broken)
        if self._socket is None:
            raise EnvironmentFailure("it was never reset")
        try:
            return await self._socket.request(message)
        except BaseException as error:  # cancelled by a deadline, too
            self._broken = f"the connection to {self.url} was given up in this episode: {describe_error(error)}"
            raise


class RewardedOpenEnv(OpenEnv):
    """An OpenEnv environment whose steps bear rewards.

    Args:
        url: of the server.
        reward: of all steps' rewards their `sum`, the `last`, or the `max`.
        max_message_bytes: the longest answer.
    """

    def __init__(self, url: str, reward: RewardAggregation = "sum", max_message_bytes: int = 64 * 1024 * 1024) -> None:
        super().__init__(url, max_message_bytes)
        self.aggregation = reward

    def get_reward(self) -> float | Unmeasured:
        """What the steps were worth, or that nobody knows.

        A null on the wire may have been a NaN, so a sum or a maximum over one is not known. An environment that speaks
        of rewards only with its last step wants `last`.

        Raises:
            EnvironmentFailure: an exchange did not come to its end.
        """
        if self._broken:
            raise EnvironmentFailure(self._broken)
        seen = self.rewards[-1:] if self.aggregation == "last" else self.rewards
        numbers = [reward for reward in seen if reward is not None]
        if not seen:
            return Unmeasured(RewardReason.MISSING, "no step bore a reward: none was taken")
        if len(numbers) < len(seen):
            told = f"{len(seen) - len(numbers)} of {len(seen)} steps came with null for their reward"
            return Unmeasured(RewardReason.MISSING, f"{told}, as NaN and inf do, too")
        return max(numbers) if self.aggregation == "max" else float(sum(numbers))


def openenv(url: str, reward: RewardAggregation = "sum", max_message_bytes: int = 64 * 1024 * 1024) -> OpenEnv:
    """An environment of an OpenEnv server: what `openenv:ws://host:port` stands for.

    Args:
        url: of the server, `ws://host:port` (or http, wss, https).
        reward: what becomes of the steps' rewards: their `sum`, the `last`, the `max`, or `none` where the server
            measures nothing and reward functions do.
        max_message_bytes: the longest answer.
    """
    if reward not in ("sum", "last", "max", "none"):
        raise ReferenceNotFoundError(f"reward = {reward!r}; it may be 'sum', 'last', 'max' or 'none'")
    if reward == "none":
        return OpenEnv(url, max_message_bytes)
    return RewardedOpenEnv(url, reward, max_message_bytes)


def _mcp_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools of MCP's `tools/list`, whichever way the server's version spells the schema's key."""
    return [
        _function(tool["name"], tool.get("description"), tool.get("inputSchema") or tool.get("input_schema"))
        for tool in tools
    ]


def _step_tool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The one tool of a server without a list; metadata is between programs."""
    properties = {name: shape for name, shape in schema.get("properties", {}).items() if name != "metadata"}
    return _function(_STEP, schema.get("description") or "Take an action.", {**schema, "properties": properties})


def _function(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    shape = {key: value for key, value in (parameters or {}).items() if key not in ("title", "description")}
    return {
        "type": "function",
        "function": {"name": name, "description": (description or "").strip(), "parameters": shape},
    }


def _json_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row what JSON can say; the prompt is the model's."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            continue
        fields[name] = value
    fields.pop("prompt", None)
    if isinstance(fields.get("seed"), int):
        fields["seed"] %= _MAX_SEED
    return fields


def _tool_result(observation: Any) -> str:
    """What an MCP tool answered.

    Raises:
        ToolError: it says that it went wrong.
        EnvironmentFailure: it could not be asked.
    """
    error = observation.get("error") if isinstance(observation, dict) else None
    if isinstance(error, dict):
        if error.get("error_type") in _MODEL_ERROR_TYPES:
            raise ToolError(str(error.get("message")))
        raise EnvironmentFailure(f"the server could not call it: {_text(error)}")
    result = observation.get("result") if isinstance(observation, dict) else observation
    if not isinstance(result, dict) or "content" not in result:
        return _text(result)
    texts = [part.get("text", "") for part in result["content"] if isinstance(part, dict)]
    if result.get("is_error"):
        raise ToolError("\n".join(texts))
    data = result.get("data")
    return "\n".join(texts) if data is None else _text(data)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
