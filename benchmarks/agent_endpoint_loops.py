"""The agents of `agent_endpoint`: loops that ask by plain JSON in a process of their own, and the environment beside.

The environment of a worker sends the URL of its episode to this process, which runs the loop and says when it has
ended.
"""

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any, ClassVar

import aiohttp
import msgspec

from benchmarks.rollout_case import Adder
from envs.contract import AgentEnvironment

_ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
_WHAT = "Add two numbers."


class Program(AgentEnvironment):
    """An episode whose loop runs elsewhere; all episodes of a worker share one connection to it.

    Args:
        port: of the process with the loops.
        dialect: which the loop speaks.
    """

    _ended: ClassVar[dict[str, asyncio.Event]] = {}
    _writer: ClassVar[asyncio.StreamWriter | None] = None
    _opening: ClassVar[asyncio.Lock] = asyncio.Lock()

    def __init__(self, port: int, dialect: str) -> None:
        self._port, self._dialect = port, dialect

    def reset(self, prompt: Any, **_row: Any) -> None:
        self._prompt = prompt

    async def run_episode(self, endpoint: str, sampling: dict[str, Any]) -> None:  # noqa: ARG002
        """Let the loop run to its end."""
        async with Program._opening:
            if Program._writer is None:
                reader, Program._writer = await asyncio.open_connection("127.0.0.1", self._port)
                _reading.append(asyncio.create_task(self._read(reader)))
        ended = Program._ended[endpoint] = asyncio.Event()
        Program._writer.write(msgspec.json.encode([self._dialect, endpoint, self._prompt]) + b"\n")
        await ended.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            Program._ended.pop(line[:-1].decode()).set()

    def get_reward(self) -> float:
        return 1.0


_reading: list[asyncio.Task[None]] = []


class Chat:
    """A loop of OpenAI's chat completions."""

    path = "chat/completions"

    def request(self, messages: list[Any], *, tools: bool = True) -> dict[str, Any]:
        """Return a request."""
        function = {"name": "add", "description": _WHAT, "parameters": _ADD}
        return {"messages": messages} | ({"tools": [{"type": "function", "function": function}]} if tools else {})

    def answer(self, body: Any) -> list[Any]:
        """Return what an answer adds to the conversation."""
        return [body["choices"][0]["message"]]

    def results(self, added: list[Any], result: str) -> list[Any]:
        """Return the results of an answer's calls."""
        calls = added[0].get("tool_calls") or ()
        return [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]


class Responses:
    """A loop of OpenAI's Responses."""

    path = "responses"

    def request(self, messages: list[Any], *, tools: bool = True) -> dict[str, Any]:
        """Return a request."""
        tool = {"type": "function", "name": "add", "description": _WHAT, "parameters": _ADD}
        return {"input": messages} | ({"tools": [tool]} if tools else {})

    def answer(self, body: Any) -> list[Any]:
        """Return what an answer adds to the conversation."""
        return list(body["output"])

    def results(self, added: list[Any], result: str) -> list[Any]:
        """Return the results of an answer's calls."""
        calls = [item for item in added if item["type"] == "function_call"]
        return [{"type": "function_call_output", "call_id": call["call_id"], "output": result} for call in calls]


class Messages:
    """A loop of Anthropic's Messages."""

    path = "messages"

    def request(self, messages: list[Any], *, tools: bool = True) -> dict[str, Any]:
        """Return a request."""
        tool = {"name": "add", "description": _WHAT, "input_schema": _ADD}
        return {"max_tokens": 1024, "messages": messages} | ({"tools": [tool]} if tools else {})

    def answer(self, body: Any) -> list[Any]:
        """Return what an answer adds to the conversation."""
        return [{"role": "assistant", "content": body["content"]}]

    def results(self, added: list[Any], result: str) -> list[Any]:
        """Return the results of an answer's calls."""
        calls = [block for block in added[0]["content"] if block["type"] == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls]
        return [{"role": "user", "content": blocks}] if blocks else []


LOOPS: dict[str, Chat | Responses | Messages] = {"chat": Chat(), "responses": Responses(), "messages": Messages()}


async def _run(session: aiohttp.ClientSession, name: str, endpoint: str, messages: Any) -> None:
    loop, adder = LOOPS[name], Adder()
    adder.reset()
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    while True:
        async with session.post(f"{endpoint}/{loop.path}", json=loop.request(messages)) as response:
            body = await response.json()
        if response.status != 200:
            raise SystemExit(f"{name}: {body}")
        added = loop.answer(body)
        results = loop.results(added, str(adder.add(1, 2)))
        if not results:
            return
        messages += [*added, *results]


async def main() -> None:
    """Serve loops until the process is killed; prints the port."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async def one(name: str, endpoint: str, messages: Any) -> None:
                with suppress(aiohttp.ClientConnectionError):  # its worker was killed: the benchmark has ended
                    await _run(session, name, endpoint, messages)
                writer.write(endpoint.encode() + b"\n")

            async with asyncio.TaskGroup() as tasks:
                while line := await reader.readline():
                    tasks.create_task(one(*json.loads(line)))

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
