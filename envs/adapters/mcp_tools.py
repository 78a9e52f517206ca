"""Tools of MCP servers, over stdio or streamable HTTP, with the official SDK.

A tool's own error (`isError`), and every other error after which the server still works, are text for the model: a
policy must not be able to choose to be invalid. Whether it works, a control question shows, the list of its tools;
after a deadline, when a busy server may answer nothing, in a new session. A server that does not answer that either, or
that closes the connection, makes the episode invalid, and the next reset opens a new session.

The SDK's connections must be closed by the task that opened them. So each session has its own task, on the event loop
of one daemon thread of this process, and calls are sent there. This also keeps blocking work of the SDK (finding and
starting a command) off the worker's event loop.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any

import anyio
from anyio.abc import TaskStatus

from envs.call import describe_error
from envs.call.threads import background_loop
from envs.contract import ToolError
from envs.references import import_extra
from stream.errors import EnvironmentFailure, ReferenceNotFoundError

_OPEN_S = 30.0
_CONTROL_S = 5.0
"""Deadline of a control question."""


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
        timeout_s: deadline of each response; the model reads that a tool missed it.
        images: give images as content parts, which the model's chat template must render; otherwise the model reads
            their type and size.

    Attributes:
        calls: tool calls of this episode: `tool`, `arguments`, the `text` returned (without images), and `is_error`.

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
        images: bool = False,
    ) -> None:
        if bool(url) == bool(command):
            raise ReferenceNotFoundError("an MCP server has a url, or a command that starts it: give one of them")
        self.address = url or " ".join([command, *args])
        self.calls: list[dict[str, Any]] = []
        self._server = url or {"command": command, "args": list(args), "env": dict(env or {}) or None, "cwd": cwd}
        self._fresh = fresh
        self._timeout_s = timeout_s
        self._images = images
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

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str | list[dict[str, Any]]:
        """Call a tool of the server, and return text, or content parts if there are images.

        Raises:
            ToolError: an error of the call, which the model reads.
            EnvironmentFailure: the server does not answer any more.
        """
        if self._broken or self._session is None:
            raise EnvironmentFailure(self._broken or "it was never reset")
        call = {"tool": name, "arguments": arguments, "text": "", "is_error": True}
        self.calls.append(call)
        try:
            content, is_error = self._session.call(name, arguments)
        except EnvironmentFailure as failure:
            if not isinstance(failure, _DeadlineError) or not self._reopen():
                self._broken = f"the session with {self.address!r} was lost in this episode: {failure}"
                raise
            content, is_error = [f"{failure}, and the session with its server was opened again"], True
        text = content_text(content)
        call.update(text=text, is_error=is_error)
        if is_error:
            raise ToolError(text)
        return content_parts(content) if self._images else text

    def _reopen(self) -> bool:
        """Leave a busy session for a new one; return whether the server works there."""
        busy, self._session = self._session, None
        if busy is not None:
            busy.leave()
        try:
            self._session = _Session(self._server, self._timeout_s)
            self._session.tools()
        except EnvironmentFailure:
            return False
        return True

    def close(self) -> None:
        """Close the session; a server started for it ends too."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


class _DeadlineError(EnvironmentFailure):
    """A call was not answered in time, and the session answers nothing else."""


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

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[list[Any], bool]:
        """Call a tool; return its content, or an error's text, and whether it is an error.

        Raises:
            _DeadlineError: there was no response in time, and there is none to a control question.
            EnvironmentFailure: there was another error, and there is no response to a control question.
        """
        try:
            response = self._run(partial(self._client.call_tool, name, arguments), self._timeout_s)
        except Exception as error:  # a JSON-RPC error, a response that the SDK refuses, a lost connection
            too_late = isinstance(error, TimeoutError)
            text = f"{name} did not answer within {self._timeout_s:g} s" if too_late else _describe(error)
            if not self._is_working():
                self.is_lost = True
                raise (_DeadlineError if too_late else EnvironmentFailure)(text) from error
            return [text], True
        return list(response.content), bool(response.is_error)

    def _is_working(self) -> bool:
        """Ask the control question: does the server still list its tools?"""
        try:
            self._run(partial(self._client.list_tools, cache_mode="bypass"), min(_CONTROL_S, self._timeout_s))
        except Exception:  # noqa: BLE001  (whatever it is, the server does not answer)
            return False
        return True

    def _request(self, call: Any) -> Any:
        try:
            return self._run(call, self._timeout_s)
        except Exception as error:
            self.is_lost = True
            raise EnvironmentFailure(_describe(error)) from error

    def _run(self, call: Any, timeout_s: float) -> Any:
        async def run() -> Any:
            with anyio.fail_after(timeout_s):
                return await call()

        return self._portal.call(run)

    def leave(self) -> None:
        """Have the session's task close its connection, without waiting for it."""
        self.is_lost = True
        with suppress(Exception):
            self._portal.call(self._leave.set)

    def close(self) -> None:
        """Let the session's task close its connection."""
        self.leave()
        with suppress(Exception):
            self._task.result(self._timeout_s)


async def _session_task(server: str | dict[str, Any], timeout_s: float, *, task_status: TaskStatus[Any]) -> None:
    """Open a session, hand it out, and close it on request, all in one task."""
    from mcp import Client, StdioServerParameters

    leave = anyio.Event()
    where = server if isinstance(server, str) else StdioServerParameters(**server)
    client = Client(where, read_timeout_seconds=2 * timeout_s)  # later than ours, so that ours decides
    with anyio.fail_after(_OPEN_S) as opening:
        async with client:
            opening.deadline = float("inf")
            task_status.started((client, leave))
            await leave.wait()


def content_text(content: Sequence[Any]) -> str:
    """Return a tool's content as text: embedded texts whole, and of other data its type, size and address."""
    return "\n".join(map(_text, content))


def content_parts(content: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return a tool's content as content parts: images, and what is between them as text; without images, as text."""
    parts: list[dict[str, Any]] = []
    for image, between in groupby(content, key=_image):
        if image:
            parts += [{"type": "image_url", "image_url": {"url": image}} for _ in between]
        else:
            parts.append({"type": "text", "text": content_text(list(between))})
    return parts if any(part["type"] != "text" for part in parts) else content_text(content)


def _image(part: Any) -> str:
    """Return the `data:` address of an image, or of a resource that is one; empty for anything else."""
    data = getattr(part, "data", None) or getattr(getattr(part, "resource", None), "blob", None)
    kind = _mime_type(part)
    return f"data:{kind};base64,{data}" if data and kind.startswith("image/") else ""


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    resource = getattr(part, "resource", part)
    text = getattr(resource, "text", None)
    if text is not None:
        return str(text)
    address = str(getattr(resource, "uri", "") or "")
    data = getattr(resource, "data", None) or getattr(resource, "blob", None)
    if data is None:  # a link
        return f"{address} {resource.name}" + (f": {resource.description}" if resource.description else "")
    size = f"{len(data) * 3 // 4 - data[-2:].count('='):,} bytes"
    return f"({', '.join(filter(None, [_mime_type(part) or part.type, size, address]))})"


def _mime_type(part: Any) -> str:
    return str(getattr(getattr(part, "resource", part), "mime_type", None) or "")


def _describe(error: BaseException) -> str:
    """Describe an error; of an exception group, the first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe_error(error)
