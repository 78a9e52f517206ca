"""MCP tool servers, over stdio or streamable HTTP, with the official SDK: the server's tools, a reward of the user's.

A tool's own error (`isError`) is text for the model, and so are arguments that the server refuses. Everything else that
keeps an answer from coming is a failure of the world: the episode is invalid, and the next reset opens a new session.

The SDK holds its connections in cancel scopes, which must be left by the task that entered them. So each session lives
in a task of its own, on an event loop of its own in one daemon thread of this process; calls are handed to it. That
also keeps what the SDK does on opening (finding and starting a command) off the worker's event loop.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal

from envs.call import describe_error
from envs.extras import import_extra
from stream.errors import EnvironmentFailure, ReferenceNotFoundError

_OPEN_S = 30.0
_MODEL_ERROR_CODES = frozenset({-32602, -32601})
"""JSON-RPC's codes for invalid parameters and unknown methods: what the model wrote does not fit."""


class ToolError(Exception):
    """What a tool answered in place of a result: text for the model."""


class McpTools:
    """The tools of one MCP server. It measures no reward: a reward function does, from `calls` and the conversation.

    Args:
        url: of a server that speaks streamable HTTP, `http://host:port/mcp`; or
        command: what starts a server that speaks over stdio, with `args`, `env` and `cwd`. One process a session.
        fresh: open a new session for each episode. Without it a session is reused until something fails on it, so that
            what the server remembers of an episode is there in the next one.
        timeout_s: for each answer of the server. Past it the session is not trusted again.

    Attributes:
        calls: the tools called in this episode: `tool`, `arguments`, the `text` answered, and whether it `is_error`.

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
        """The facts, without the session."""
        facts = object.__new__(type(self))
        facts.__dict__.update({"place": self.address, "calls": self.calls, "_broken": self._broken})
        return facts

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Ask the server for its tools, in a session that is closed again.

        Raises:
            ReferenceNotFoundError: nothing answers there.
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
                f"no MCP server answers at {self.address!r}: {failure}. Its tools stand in the prompt, so it has to be "
                "there from the start"
            ) from failure

    def reset(self) -> None:
        """Begin an episode, with a new session where the last one failed.

        Raises:
            EnvironmentFailure: no session can be opened.
        """
        self.calls, self._broken = [], ""
        if self._fresh or (self._session is not None and self._session.is_lost):
            self.close()
        if self._session is None:
            self._session = _Session(self._server, self._timeout_s)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the server's.

        Raises:
            ToolError: the tool's own error, for the model to read.
            EnvironmentFailure: no answer came.
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
        """End the session; a server that was started for it ends too."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


class _Session:
    """One session, in a task of its own. Its methods block: they are for threads other than the loop's."""

    def __init__(self, server: str | dict[str, Any], timeout_s: float) -> None:
        self.is_lost = False
        self._timeout_s = timeout_s
        try:
            self._portal = _portal()
            self._task, (self._client, self._leave) = self._portal.start_task(partial(_session_task, server, timeout_s))
        except Exception as error:
            raise EnvironmentFailure(f"no session: {_describe(error)}") from error

    def tools(self) -> list[dict[str, Any]]:
        """The server's tools in OpenAI's form, of all its pages."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = self._request(partial(self._client.list_tools, cursor=cursor))
            for tool in page.tools:
                shape = {key: value for key, value in tool.input_schema.items() if key not in ("title", "$schema")}
                function = {"name": tool.name, "description": tool.description or "", "parameters": shape}
                found.append({"type": "function", "function": function})
            cursor = page.next_cursor
            if not cursor:
                return found

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """What a tool answered as text, and whether that is an error."""
        from mcp import MCPError

        try:
            answer = self._request(partial(self._client.call_tool, name, arguments))
        except MCPError as error:
            return error.error.message, True
        texts = [getattr(part, "text", None) or f"({part.type})" for part in answer.content]
        return "\n".join(texts), bool(answer.is_error)

    def _request(self, question: Any) -> Any:
        from mcp import MCPError

        async def ask() -> Any:
            with anyio.fail_after(self._timeout_s):
                return await question()

        try:
            return self._portal.call(ask)
        except MCPError as error:
            if error.error.code in _MODEL_ERROR_CODES:
                raise
            self.is_lost = True
            raise EnvironmentFailure(_describe(error)) from error
        except Exception as error:
            self.is_lost = True
            raise EnvironmentFailure(_describe(error)) from error

    def close(self) -> None:
        """Have the task leave what it entered."""
        self.is_lost = True
        with suppress(Exception):
            self._portal.call(self._leave.set)
            self._task.result(self._timeout_s)


async def _session_task(server: str | dict[str, Any], timeout_s: float, *, task_status: TaskStatus[Any]) -> None:
    """Enter a session, hand it out, and leave it when told to, all in one task."""
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
    """An error's text; of a group's, that of its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe_error(error)


_portal_lock = threading.Lock()
_portals: list[BlockingPortal] = []


def _portal() -> BlockingPortal:
    """The event loop of all sessions of this process; its thread is a daemon, and ends with the process."""

    async def serve(ready: threading.Event) -> None:
        async with BlockingPortal() as portal:
            _portals.append(portal)
            ready.set()
            await portal.sleep_until_stopped()

    with _portal_lock:
        if not _portals:
            ready = threading.Event()
            threading.Thread(target=partial(anyio.run, serve, ready), name="MCP sessions", daemon=True).start()
            if not ready.wait(_OPEN_S):
                raise EnvironmentFailure(f"the thread of MCP's sessions did not start within {_OPEN_S:g} s")
    return _portals[0]
