"""`penstock play` against an OpenAI-compatible server; tests/vllm/test_play_on_vllm.py plays against real ones."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Thread

import pytest
from click.testing import CliRunner

from stream.errors import PenstockError, SettingsError
from workers.cli import penstock
from workers.evaluate.play import PlayOptions, play_and_print

TILL = "examples/own_env/envs/till.py:Till"


@contextmanager
def served(reply):
    """Serve chat completions: `reply(request, number)` returns a message, or a status and an error's text."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200, {"data": [{"id": "tiny"}]})

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers.get("Authorization"), request))
            result = reply(request, len(requests) - 1)
            if isinstance(result, tuple):
                return self.answer(result[0], {"error": {"message": result[1]}})
            message = {"role": "assistant", "content": result} if isinstance(result, str) else result
            return self.answer(200, {"choices": [{"message": message, "finish_reason": "stop"}]})

        def answer(self, status, body):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


def add(a, b):
    function = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": function}]}


def test_an_environment_is_played_and_mean_and_spread_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")

    def reply(request, _):
        if request["messages"][-1]["role"] == "tool":
            return "It is 3."
        return add(1, 2 if request["seed"] % 2 else 5)

    out = tmp_path / "played.jsonl"
    with served(reply) as (url, requests):
        fields = {"answer": 3, "prompt": "1 + 2?"}
        options = PlayOptions(ref=TILL, endpoint=url + "/v1/", fields=fields, count=8, out=out)
        assert play_and_print(options) == 0
    text = capsys.readouterr().out
    rewards = [json.loads(line)["reward"] for line in out.read_text().splitlines()]
    assert sorted(set(rewards)) == [0.0, 1.0]
    assert f"reward: mean {sum(rewards) / 8:.3f}, standard deviation" in text
    assert "8 episodes: 8 finished; 2.0 turns on average, 8 tool calls, 0 tool errors" in text
    assert "→ add(a=1, b=2)" in text
    path, key, request = requests[0]
    assert (path, key, request["model"]) == ("/v1/chat/completions", "Bearer sk-secret", "tiny")
    assert [tool["function"]["name"] for tool in request["tools"]] == ["add", "subtract", "multiply"]
    assert "return" not in request["tools"][0]["function"]
    answered = next(r for _, _, r in requests if len(r["messages"]) > 1)["messages"]
    assert isinstance(answered[1]["tool_calls"][0]["function"]["arguments"], str)
    assert answered[1]["tool_calls"][0]["id"] == answered[2]["tool_call_id"]


def test_a_server_without_a_tool_parser_shows_the_tools_and_its_text_is_parsed(capsys):
    def reply(request, _):
        if request.get("tool_choice") == "auto":
            return 400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        if request["messages"][-1]["role"] == "tool":
            return "3"
        return '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'

    with served(reply) as (url, requests):
        options = PlayOptions(ref=TILL, endpoint=url, model="m", fields={"answer": 3, "prompt": "1 + 2?"}, count=1)
        assert play_and_print(options) == 0
    assert "reward: mean 1.000" in capsys.readouterr().out
    assert [request["tool_choice"] for _, _, request in requests] == ["auto", "none", "none"]


def test_episodes_that_began_before_the_refusal_are_repeated_without_a_tool_parser(capsys):
    """All episodes begin at the same time, so all their first requests are refused."""
    all_asked = Barrier(3)

    def reply(request, _):
        if request.get("tool_choice") == "auto":
            all_asked.wait(timeout=10)
            return 400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        return "3"

    with served(reply) as (url, _):
        options = PlayOptions(ref=TILL, endpoint=url, model="m", fields={"answer": 3, "prompt": "1 + 2?"}, count=3)
        assert play_and_print(options) == 0
    assert "3 episodes: 3 finished" in capsys.readouterr().out


def test_turns_are_answered_and_calls_that_are_not_json_are_read_by_the_model(capsys):
    broken = {"tool_calls": [{"function": {"name": "open", "arguments": "{"}}]}
    with served(lambda request, number: broken if number == 0 else "Sesame") as (url, _):
        options = PlayOptions(ref="tests.cases.answering:Cave", endpoint=url, count=1)
        assert play_and_print(options, as_json=True) == 0
    played = json.loads(capsys.readouterr().out)
    (completion,) = played["completions"]
    roles = [message["role"] for message in completion["messages"]]
    assert roles == ["assistant", "tool", "assistant", "user", "assistant"]
    assert "its arguments are not JSON" in completion["messages"][1]["content"]
    assert (played["mean"], played["std"], played["ends"]) == (1.0, 0.0, {"finished": 1})


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((401, "bad key"), "answers 401: bad key"),
        ({}, "finished"),  # an empty message is a turn
    ],
)
def test_a_refusal_is_a_failed_episode_with_the_servers_words(reply, said, capsys):
    with served(lambda *_: reply) as (url, _):
        options = PlayOptions(ref=TILL, endpoint=url, fields={"answer": 3, "prompt": "1 + 2?"}, count=1)
        code = play_and_print(options)
    assert said in capsys.readouterr().out.replace("\n           ", " ")
    assert code == (0 if said == "finished" else 1)


def test_what_is_missing_is_said_before_an_environment_is_played(tmp_path):
    with pytest.raises(SettingsError, match="give a model: --policy FOLDER"):
        play_and_print(PlayOptions(ref=TILL))
    with pytest.raises(PenstockError, match=r"no server answers at http://127\.0\.0\.1:9/v1"):
        play_and_print(PlayOptions(ref=TILL, endpoint="http://127.0.0.1:9", fields={"answer": 3}))
    with pytest.raises(SettingsError, match="reset needs 'answer'; give --field answer=VALUE"):
        play_and_print(PlayOptions(ref=TILL, endpoint="http://127.0.0.1:9"))
    with pytest.raises(PenstockError, match="the row's secret 0 is not between 1 and 100"):
        play_and_print(PlayOptions(ref="guess", endpoint="http://127.0.0.1:9", fields={"secret": 0}))
    with pytest.raises(SettingsError, match="has no policy"):
        play_and_print(PlayOptions(ref=TILL, policy=tmp_path))
    result = CliRunner().invoke(penstock, ["play", TILL, "--field", "answer"])
    assert "write it as name=value" in result.output
