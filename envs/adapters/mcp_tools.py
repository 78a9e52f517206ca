"""Tools of MCP servers, over stdio or streamable HTTP, with the official SDK.

A tool's own error (`isError`) and arguments that the server refuses are text for the model. Any other failure makes the
episode invalid, and the next reset opens a new session.

The SDK's connections must be closed by the task that opened them. So each session has its own task, on the event loop
of one daemon thread of this process, and calls are sent there. This also keeps blocking work of the SDK (finding and
starting a command) off the worker's event loop.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskStatus

from envs.call import describe_error
from envs.call.background_loop import background_loop
from envs.contract import ToolError
from envs.extras import import_extra
from stream.errors import EnvironmentFailure, ReferenceNotFoundError

_OPEN_S = 30.0
_MODEL_ERROR_CODES = frozenset({-32602, -32601})
"""JSON-RPC codes for invalid parameters and unknown methods: errors in what the model wrote."""


class McpTools:
    """The tools of one MCP server. The reward comes from a reward function, from `calls` and the conversation.

    Args:
        url: URL of a streamable HTTP server, `http://host:port/mcp`; or
        command: command that starts a stdio server, with `args`, `env` and `cwd`; one process for each session.
        args: arguments of the command.
        env: environment variables of the command.
        cwd: working directory of the command.
        fresh: open a new session for each episode. Otherwise a session is reused until it fails, with whatever state
            the server keeps.
        timeout_s: deadline of each response; a session that misses it is closed.

    Attributes:
        calls: tool calls of this episode: `tool`, `arguments`, the `text` returned, and `is_error`.

    Example::

        [environments.files]
        ref = "mcp"
        args = { command = "python", args = ["servers/files.py"] }
    """

    def __init__(
        self,
        url: str = "",
        command: str = "",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        *,
        fresh: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        if bool(url) == bool(command):
            raise ReferenceNotFoundError("an MCP server has a url, or a command that starts it: give one of them")
        self.address = url or " ".join([command, *args])
        self.calls: list[dict[str, Any]] = []
        self._server = url or {"command": command, "args": list(args), "env": dict(env or {}) or None, "cwd": cwd}
        self._fresh = fresh
        self._timeout_s = timeout_s
        self._session: _Session | None = None
        self._broken = ""

    def __copy__(self) -> "McpTools":
        """Copy the data without the session."""
        copied = object.__new__(type(self))
        copied.__dict__.update({"address": self.address, "calls": self.calls, "_broken": self._broken})
        return copied

    def tool_schemas(self) -> list[dict[str, Any]]:
        """List the server's tools, in a separate session.

        Raises:
            ReferenceNotFoundError: the server does not answer.
        """
        import_extra("mcp", "mcp")
        try:
            session = _Session(self._server, self._timeout_s)
            try:
                return session.tools()
            finally:
                session.close()
        except EnvironmentFailure as failure:
            raise ReferenceNotFoundError(
                f"no MCP server answers at {self.address!r}: {failure}. Its tools are part of the prompt, so it must "
                "run before the workers start"
            ) from failure

    def reset(self) -> None:
        """Start an episode; open a new session if the last one failed.

        Raises:
            EnvironmentFailure: no session can be opened.
        """
        self.calls, self._broken = [], ""
        if self._fresh or (self._session is not None and self._session.is_lost):
            self.close()
        if self._session is None:
            self._session = _Session(self._server, self._timeout_s)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the server.

        Raises:
            ToolError: the tool's own error, which the model reads.
            EnvironmentFailure: there was no response.
        """
        if self._broken or self._session is None:
            raise EnvironmentFailure(self._broken or "it was never reset")
        call = {"tool": name, "arguments": arguments, "text": "", "is_error": True}
        self.calls.append(call)
        try:
            text, is_error = self._session.call(name, arguments)
        except EnvironmentFailure as failure:
            self._broken = f"the session with {self.address!r} was lost in this episode: {failure}"
            raise
        call.update(text=text, is_error=is_error)
        if is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """Close the session; a server started for it ends too."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


class _Session:
    """One session, in its own task. Its methods block, so call them in other threads than the event loop's."""

    def __init__(self, server: str | dict[str, Any], timeout_s: float) -> None:
        self.is_lost = False
        self._timeout_s = timeout_s
        try:
            self._portal = background_loop()
            self._task, (self._client, self._leave) = self._portal.start_task(partial(_session_task, server, timeout_s))
        except Exception as error:
            raise EnvironmentFailure(f"no session: {_describe(error)}") from error

    def tools(self) -> list[dict[str, Any]]:
        """Return the server's tools from all pages, in OpenAI's form."""
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = self._request(partial(self._client.list_tools, cursor=cursor))
            for tool in page.tools:
                parameters = {key: value for key, value in tool.input_schema.items() if key not in ("title", "$schema")}
                function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
                tools.append({"type": "function", "function": function})
            cursor = page.next_cursor
            if not cursor:
                return tools

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Call a tool; return its text and whether it is an error."""
        from mcp import MCPError

        try:
            response = self._request(partial(self._client.call_tool, name, arguments))
        except MCPError as error:
            return error.error.message, True
        texts = [getattr(part, "text", None) or f"({part.type})" for part in response.content]
        return "\n".join(texts), bool(response.is_error)

    def _request(self, call: Any) -> Any:
        from mcp import MCPError

        async def run() -> Any:
            with anyio.fail_after(self._timeout_s):
                return await call()

        try:
            return self._portal.call(run)
        except MCPError as error:
            if error.error.code in _MODEL_ERROR_CODES:
                raise
            self.is_lost = True
            raise EnvironmentFailure(_describe(error)) from error
        except Exception as error:
            self.is_lost = True
            raise EnvironmentFailure(_describe(error)) from error

    def close(self) -> None:
        """Let the session's task close its connection."""
        self.is_lost = True
        with suppress(Exception):
            self._portal.call(self._leave.set)
            self._task.result(self._timeout_s)


async def _session_task(server: str | dict[str, Any], timeout_s: float, *, task_status: TaskStatus[Any]) -> None:
    """Open a session, hand it out, and close it on request, all in one task."""
    from mcp import Client, StdioServerParameters

    leave = anyio.Event()
    where = server if isinstance(server, str) else StdioServerParameters(**server)
    client = Client(where, read_timeout_seconds=timeout_s)
    with anyio.fail_after(_OPEN_S) as opening:
        async with client:
            opening.deadline = float("inf")
            task_status.started((client, leave))
            await leave.wait()


def _describe(error: BaseException) -> str:
    """Describe an error; of an exception group, the first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe_error(error)
