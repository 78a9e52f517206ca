"""An engine that answers every turn after the same time, from prepared bytes, so that it is never what limits.

    python -m benchmarks.rollout_server CASE.json --api generate [--delay-ms 50]

It prints its URL. `GET /answered` returns the number of turns that it has answered.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import cast

import msgspec
import uvloop


class _Generate(msgspec.Struct):
    token_ids: list[int]


class _Completions(msgspec.Struct):
    prompt: list[int]


class Server:
    """Answers both routes.

    Args:
        turns: sampled tokens of each turn of an episode.
        start_id: token that begins a message.
        has_generate: whether the route `/inference/v1/generate` is there.
        delay_s: how long a turn takes.
    """

    def __init__(self, turns: list[list[int]], start_id: int, *, has_generate: bool, delay_s: float) -> None:
        self.answered = 0
        self._delay_s = delay_s
        self._start_id, self._has_generate = start_id, has_generate
        self._generated = [_http(_generate_body(ids)) for ids in turns]
        self._completed = [_http(_completions_body(ids)) for ids in turns]
        self._decoders = msgspec.json.Decoder(_Generate), msgspec.json.Decoder(_Completions)
        self._first_count: int | None = None
        self._queries = {
            b"/health": {},
            b"/version": {"version": "fixed latency"},
            b"/v1/models": {"data": [{"id": "policy", "max_model_len": 131072}]},
            b"/weight_info": {"weight_version": "0"},
            b"/is_paused": {"is_paused": False},
        }

    def answer(self, method: bytes, path: bytes, body: bytes) -> tuple[bytes, float]:
        """Return the bytes of a response, and how long to wait before sending it."""
        if method == b"GET":
            found = {"answered": self.answered} if path == b"/answered" else self._queries.get(path)
            return (_http(json.dumps(found).encode()) if found is not None else _http(b"{}", 404)), 0.0
        is_generate = path == b"/inference/v1/generate"
        if is_generate and not self._has_generate:
            return _http(b"{}", 404), 0.0
        try:
            request = self._decoders[not is_generate].decode(body)
        except msgspec.DecodeError:
            return _http(b'{"error": {"message": "no tokens"}}', 400), 0.0
        ids = request.token_ids if isinstance(request, _Generate) else request.prompt
        answers = self._generated if is_generate else self._completed
        if b'"probe-' in body:
            return _http((_generate_body if is_generate else _completions_body)([5], "length")), 0.0
        return answers[min(self._turn(ids), len(answers) - 1)], self._delay_s

    def _turn(self, ids: list[int]) -> int:
        """Return the turn, from 0: each adds a tool's message and the start of the next answer."""
        count = ids.count(self._start_id)
        self._first_count = min(count, self._first_count or count)
        return (count - self._first_count) // 2


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, without pipelining."""

    def __init__(self, server: Server) -> None:
        self._server, self._buffer = server, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        lower = head.lower()
        at = lower.find(b"content-length:")
        length = (
            int(lower[at + 15 : (lower.find(b"\r\n", at) if lower.find(b"\r\n", at) > 0 else None)]) if at > 0 else 0
        )
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        method, path, _ = head.split(b" ", 2)
        answer, delay_s = self._server.answer(method, path, body)
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._send_turn, answer)
        else:
            self._transport.write(answer)

    def _send_turn(self, answer: bytes) -> None:
        self._server.answered += 1
        if not self._transport.is_closing():
            self._transport.write(answer)


def _generate_body(ids: list[int], finish_reason: str = "stop") -> bytes:
    content = [{"token_id": token, "logprob": -0.25 - token / 65536} for token in ids]
    spans = [{"version": "0", "start": 0, "end": len(ids)}]
    choice = {"index": 0, "token_ids": ids, "finish_reason": finish_reason, "logprobs": {"content": content}}
    return json.dumps({"request_id": "r", "choices": [choice | {"weight_versions": spans}]}).encode()


def _completions_body(ids: list[int], finish_reason: str = "stop") -> bytes:
    logprobs = {"token_logprobs": [-0.25 - token / 65536 for token in ids]}
    choice = {"index": 0, "text": "", "finish_reason": finish_reason, "token_ids": ids, "logprobs": logprobs}
    return json.dumps({"id": "r", "model": "policy", "choices": [choice]}).encode()


def _http(body: bytes, status: int = 200) -> bytes:
    head = f"HTTP/1.1 {status} S\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _serve(server: Server) -> None:
    listening = await asyncio.get_running_loop().create_server(lambda: Connection(server), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
    await listening.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=Path)
    parser.add_argument("--api", choices=("generate", "completions"), default="generate")
    parser.add_argument("--delay-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    case = json.loads(arguments.case.read_text())
    uvloop.run(
        _serve(
            Server(
                case["turns"],
                case["start_id"],
                has_generate=arguments.api == "generate",
                delay_s=arguments.delay_ms / 1000,
            )
        )
    )


if __name__ == "__main__":
    main()
