"""OpenEnv: environments behind the WebSocket of an unmodified OpenEnv server (`openenv-core` 0.2 and 0.3).

::

    ->  {"type": "reset", "data": {"seed": 7, ...}}
    <-  {"type": "observation", "data": {"observation": {...}, "reward": null, "done": false}}
    ->  {"type": "step", "data": {"type": "call_tool", "tool_name": "echo_message", "arguments": {"message": "hi"}}}
    <-  {"type": "observation", "data": {"observation": {"tool_name": ..., "result": {...}}, "reward": 0.2, ...}}
    <-  {"type": "error", "data": {"message": "...", "code": "EXECUTION_ERROR"}}

An error of that code, the last line, is an exception of the environment's `step`, usually an illegal action: the model
reads it, as it reads that of a raising tool.

After an incomplete exchange the socket is closed (see `openenv_socket.py`), the episode is invalid, and the next reset
connects again. Only `/ws` keeps an episode: the HTTP routes make a new environment for each call.

The tools are those in the server's MCP list. A server without a list has one tool, `step`, with its action schema.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from envs.adapters.openenv_socket import EnvironmentSocket, RequestRefusedError, websocket_url
from envs.adapters.step_rewards import AggregationMethod, NoStep, RewardAggregation
from envs.call import describe_error
from envs.contract import ToolError
from stream.errors import EnvironmentFailure, ReferenceNotFoundError
from stream.validity import Unmeasured

_STEP = "step"
"""The tool of a server without an MCP list. OpenEnv reserves the name."""
_MAX_SEED = 2**31
"""Some random generators behind such servers refuse larger seeds."""
_MODEL_ERROR_TYPES = frozenset({"execution_error", "invalid_args", "tool_not_found", "timeout"})
"""Tool errors that the model reads; others make the episode invalid."""


class OpenEnv:
    """An OpenEnv environment without `get_reward`: reward functions score the episode.

    Args:
        url: URL of the server, `ws://host:port` (or http, wss, https).
        max_message_bytes: size limit of a response.

    Attributes:
        calls: tool calls of this episode, with arguments and the server's observation.
        rewards: reward of each step; None if the server sent null, which it does for NaN. A call that was refused, by
            the server or by a tool, and has no reward is no step.
        done: the server ended the episode.
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
        """Copy the data without the socket."""
        copied = object.__new__(type(self))
        copied.__dict__.update(vars(self) | {"_socket": None})
        return copied

    async def tool_schemas(self) -> list[dict[str, Any]]:
        """List the server's tools, on a separate connection.

        Raises:
            ReferenceNotFoundError: the server does not answer; the message says how to start one.
        """
        try:
            async with EnvironmentSocket.open(self.url, self._max_message_bytes) as socket:
                list_request = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
                response = await socket.request({"type": "mcp", "data": list_request})
                listed = response.get("result")
                return _mcp_tools(listed["tools"]) if listed else [_step_tool(await socket.action_schema())]
        except EnvironmentFailure as failure:
            raise ReferenceNotFoundError(
                f"no OpenEnv server answers at {self.url}: {failure}. Its tools are part of the prompt, so it must "
                "run before the workers start, e.g. `python -m uvicorn server.app:app --port 8000` in the "
                "environment's folder"
            ) from failure

    async def reset(self, **row: Any) -> str | None:
        """Start an episode; the server uses the fields that its own `reset` names.

        Raises:
            EnvironmentFailure: the server cannot be reached, or its reset failed.
        """
        self.observation, self.calls, self.rewards, self.done, self._broken = None, [], [], False, ""
        if self._socket is None or self._socket.is_closed:
            self._socket = await EnvironmentSocket.connect(self.url, self._max_message_bytes)
        response = await self._exchange({"type": "reset", "data": _json_fields(row)})
        self.done = bool(response.get("done"))
        self.observation = response.get("observation") or None
        return _text(self.observation) if self.observation else None

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Take a step.

        Raises:
            ToolError: the tool's error, which the model reads.
            EnvironmentFailure: the server or the connection failed.
        """
        if self.done:
            raise ToolError("the episode is over")
        action = arguments if name == _STEP else {"type": "call_tool", "tool_name": name, "arguments": arguments}
        call = {"tool": name, "arguments": arguments, "observation": None}
        self.calls.append(call)
        try:
            response = await self._exchange({"type": "step", "data": action})
        except RequestRefusedError as refusal:
            raise ToolError(str(refusal)) from refusal
        self.done = self.done or bool(response.get("done"))  # calls of one turn run concurrently
        reward = response.get("reward")
        call["observation"] = observation = response.get("observation")
        try:
            text = _text(observation) if name == _STEP else _tool_result(observation)
        except ToolError:
            self.rewards += [] if reward is None else [reward]
            raise
        self.rewards.append(reward)
        return text

    async def close(self) -> None:
        """Close the socket, which ends the server's session."""
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
        except RequestRefusedError:
            raise
        except BaseException as error:  # including cancellation by a deadline
            self._broken = f"the connection to {self.url} was closed in this episode: {describe_error(error)}"
            raise


class RewardedOpenEnv(OpenEnv):
    """An OpenEnv environment whose steps have rewards.

    Args:
        url: URL of the server.
        reward: `sum`, `last` or `max` of the steps' rewards.
        no_step: reward of an episode without a step; `last` and `max` require it.
        max_message_bytes: size limit of a response.
    """

    def __init__(
        self,
        url: str,
        reward: AggregationMethod = "sum",
        no_step: NoStep | None = None,
        max_message_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        super().__init__(url, max_message_bytes)
        self.aggregation = RewardAggregation.from_options(reward, no_step)

    def get_reward(self) -> float | Unmeasured:
        """Return the aggregated reward, or `Unmeasured`.

        A null from the server may have been NaN, so the sum or maximum over it is unknown. For an environment that
        rewards only its last step use `last`.

        Raises:
            EnvironmentFailure: an exchange failed in this episode.
        """
        if self._broken:
            raise EnvironmentFailure(self._broken)
        return self.aggregation.aggregate(self.rewards)


def openenv(
    url: str,
    reward: AggregationMethod | Literal["none"] = "sum",
    no_step: NoStep | None = None,
    max_message_bytes: int = 64 * 1024 * 1024,
) -> OpenEnv:
    """Make an environment of an OpenEnv server, for references `openenv:ws://host:port`.

    Args:
        url: URL of the server, `ws://host:port` (or http, wss, https).
        reward: `sum`, `last` or `max` of the steps' rewards; `none` if only reward functions score the episode.
        no_step: reward of an episode without a step, a number or `invalid`. Default for `sum`: 0.0; `last` and `max`
            require it.
        max_message_bytes: size limit of a response.
    """
    if reward not in ("sum", "last", "max", "none"):
        raise ReferenceNotFoundError(f"reward = {reward!r}; it may be 'sum', 'last', 'max' or 'none'")
    if reward != "none":
        return RewardedOpenEnv(url, reward, no_step, max_message_bytes)
    if no_step is not None:
        raise ReferenceNotFoundError("no_step has no effect with reward = 'none': leave one of them out")
    return OpenEnv(url, max_message_bytes)


def _mcp_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert the tools of MCP's `tools/list`; server versions spell the schema's key in two ways."""
    return [
        _function(tool["name"], tool.get("description"), tool.get("inputSchema") or tool.get("input_schema"))
        for tool in tools
    ]


def _step_tool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Make the tool of a server without an MCP list; `metadata` is not for the model."""
    properties = {name: schema for name, schema in schema.get("properties", {}).items() if name != "metadata"}
    return _function(_STEP, schema.get("description") or "Take an action.", {**schema, "properties": properties})


def _function(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    schema = {key: value for key, value in (parameters or {}).items() if key not in ("title", "description")}
    return {
        "type": "function",
        "function": {"name": name, "description": (description or "").strip(), "parameters": schema},
    }


def _json_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that JSON can express, without the prompt."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            continue
        fields[name] = value
    fields.pop("prompt", None)
    for name in ("seed", "completion_seed"):
        if isinstance(fields.get(name), int):
            fields[name] %= _MAX_SEED
    return fields


def _tool_result(observation: Any) -> str:
    """Return the text of an MCP tool's result.

    Raises:
        ToolError: the tool reported an error.
        EnvironmentFailure: the server could not call the tool.
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
