"""`judge` against a scripted chat server: its requests, which replies are verdicts, and how it treats other replies."""

import json
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from envs.remote.judge import Judge
from envs.remote.service_client import HARMLESS_ANSWER
from envs.rewards import RewardBatch, RewardFunction
from stream.errors import ReferenceNotFoundError, RunFailedError
from stream.validity import Measured, RewardReason, Unmeasured
from stream.waiting import Backoff
from workers.engine_api.http_server import listen

KEY = "sk-very-secret"


class Chat:
    """A scripted server: `say(number, request)` returns the judge's answer: a text, a status, or a whole response."""

    def __init__(self, say) -> None:
        self.say = say
        self.asked, self.headers = [], []
        self.answer_headers = {}
        self.under_way = self.most = 0

    async def complete(self, http: web.Request) -> web.Response:
        return await self.complete_as(http, json.loads(await http.read()))

    async def complete_as(self, http: web.Request, request) -> web.Response:
        number = len(self.asked)
        self.asked.append(request)
        self.headers.append(dict(http.headers))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await anyio.lowlevel.checkpoint()
        self.under_way -= 1
        text = self.say(number, request)
        if isinstance(text, int):
            heard = http.headers.get("Authorization")
            body = json.dumps({"error": {"message": f"status {text} for {heard}"}})
            return web.Response(status=text, text=body, headers=self.answer_headers)
        if isinstance(text, dict):
            return web.Response(text=json.dumps(text))
        return web.Response(text=json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}))


@asynccontextmanager
async def judging(say, client=None, **args):
    chat = Chat(say)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat.complete)
    client = {"timeout_s": 2.0} | (client or {})
    async with listen(app, "127.0.0.1", 0) as url, Judge(url, "m", client=client, **args) as judge:
        yield chat, judge


async def verdict(say, **args):
    async with judging(lambda *_: say, **args) as (_, judge):
        (reward,) = await judge(["p"], ["c"])
    return reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Good.\nScore: 10", 1.0),
        ("Score: 1", 0.0),
        ("**Score:** 5.5", 0.5),
        ("The answer says 'Score: 10'.\nScore: 2\nSCORE = 4", 1 / 3),
    ],
)
async def test_a_score_is_mapped_to_0_to_1(text, expected):
    assert await verdict(text) == Measured(expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I cannot say.", RewardReason.NOT_NUMERIC),
        ("", RewardReason.NOT_NUMERIC),
        (None, RewardReason.NOT_NUMERIC),
        ("Score: ten", RewardReason.NOT_NUMERIC),
        ("Score: 11", RewardReason.NOT_NUMERIC),
        ("Score: 0", RewardReason.NOT_NUMERIC),
        ("Score: -3", RewardReason.NOT_NUMERIC),
        ({"choices": []}, RewardReason.SHAPE),
        ({"object": "error"}, RewardReason.SHAPE),
        (400, RewardReason.RAISED),
        (401, RewardReason.RAISED),
        (503, RewardReason.UNAVAILABLE),
    ],
    ids=str,
)
async def test_a_judge_that_gives_no_score_to_any_answer_measures_nothing(text, reason):
    reward = await verdict(text)
    assert (type(reward), reward.reason) == (Unmeasured, reason)


def provoked(reply):
    """Return a judge that can judge everything but the completion `attack`."""
    return lambda _, request: reply if "attack" in request["messages"][-1]["content"] else "Score: 7"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("I cannot help with that.", RewardReason.NOT_NUMERIC),
        ("Score: 11", RewardReason.NOT_NUMERIC),
        ("Score: 0", RewardReason.NOT_NUMERIC),
        (None, RewardReason.NOT_NUMERIC),
        ({"choices": []}, RewardReason.SHAPE),
        (400, RewardReason.RAISED),  # beyond the judge's context
        (413, RewardReason.RAISED),
    ],
    ids=str,
)
async def test_a_completion_that_keeps_a_working_judge_from_a_verdict_has_the_worst_reward(reply, reason):
    async with judging(provoked(reply)) as (chat, judge):
        attacking, fair = await judge(["p"] * 2, ["attack", "c"])
    assert (attacking.value, attacking.reason) == (0.0, reason)
    assert "to the same prompt has a score" in attacking.detail
    assert fair == Measured(6 / 9)
    assert HARMLESS_ANSWER in chat.asked[-1]["messages"][-1]["content"]


async def test_a_judge_that_fails_once_is_asked_again():
    async with judging(lambda number, _: "Score: 10" if number else "Hm.") as (chat, judge):
        assert await judge(["p"], ["c"]) == [Measured(1.0)]
    assert len(chat.asked) == 2


@pytest.mark.parametrize("outage_at", [0, 1, 2])
async def test_an_outage_is_never_the_models_fault(outage_at):
    """At the question, at its repetition, or at the control question: nobody knows what the answer is worth."""
    say = provoked("No.")
    async with judging(
        lambda number, request: 503 if number == outage_at else say(number, request), client={"max_attempts": 1}
    ) as (_, judge):
        (reward,) = await judge(["p"], ["attack"])
    assert isinstance(reward, Unmeasured)


async def test_a_provoked_refusal_costs_no_sibling_its_verdict_when_it_takes_too_long():
    async def hang(*_):
        await anyio.sleep_forever()

    async with judging(lambda *_: "Score: 10") as (chat, judge):
        answer = chat.complete_as

        async def complete(http, request):
            return await (hang() if "attack" in request["messages"][-1]["content"] else answer(http, request))

        chat.complete_as = complete
        function = RewardFunction(judge, "judge", call_options=judge.call_options)
        slow, fair = await function(RewardBatch(["p"] * 2, ["attack", "c"], [[1]] * 2), 1.0)
    assert (slow.reason, fair) == (RewardReason.TIMEOUT, Measured(1.0))


async def test_a_very_long_verdict_is_read_at_once():
    with anyio.fail_after(5):
        reward = await verdict("\n" * 300_000 + "Score: 10")
        assert reward == Measured(1.0)
        assert isinstance(await verdict('{"a":' * 60_000, score_pattern="json:score"), Unmeasured)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"score": 7, "why": "x"}', 0.7),
        ('```json\n{"why": {"a": 1}, "score": 0}\n```', 0.0),
        ('first {"score": 1} then {"score": 10}', 1.0),
        ('{"scor": 7}', RewardReason.NOT_NUMERIC),
        ('{"score": "7"}', RewardReason.NOT_NUMERIC),
        ('{"score": NaN}', RewardReason.NOT_FINITE),
        ('{"score": 7', RewardReason.NOT_NUMERIC),
        ("7", RewardReason.NOT_NUMERIC),
    ],
)
async def test_a_score_may_be_a_key_of_json(text, expected):
    reward = await verdict(text, score_pattern="json:score", scale=[0, 10])
    assert (reward.value if isinstance(reward, Measured) else reward.reason) == expected


async def test_the_template_is_filled_in_once_with_prompt_completion_and_columns():
    template = 'Rubric {rubric}; {"json": {unknown}}\nQ: {prompt}\nA: {completion}'
    async with judging(lambda *_: "Score: 3", prompt_template=template, system_prompt="Be fair.") as (chat, judge):
        await judge(["why {rubric}?"], ["because {prompt}"], rubric=["R {completion}"])
        turns = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "sure?"}]
        await judge([[{"role": "user", "content": "1 + 2"}]], [turns], rubric=[7])
    first, second = (body["messages"] for body in chat.asked)
    assert first == [
        {"role": "system", "content": "Be fair."},
        {
            "role": "user",
            "content": 'Rubric R {completion}; {"json": {unknown}}\nQ: why {rubric}?\nA: because {prompt}',
        },
    ]
    assert second[1]["content"].endswith("Q: 1 + 2\nA: [assistant]\n3\n\n[user]\nsure?")
    assert (chat.asked[0]["model"], chat.asked[0]["temperature"]) == ("m", 0.0)


async def test_the_key_comes_from_the_environment_and_is_in_no_message(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with capture_logs() as events:
        async with judging(lambda number, _: 503 if number < 2 else 401, client={"api_key_env": "JUDGE_KEY"}) as (
            chat,
            judge,
        ):
            (refused,) = await judge(["p"], ["c"])
        async with judging(lambda *_: f"I was given {KEY}", client={"api_key_env": "JUDGE_KEY"}) as (_, judge):
            (silent,) = await judge(["p"], ["c"])
    assert chat.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert refused.reason is RewardReason.RAISED
    assert "***" in refused.detail
    assert "***" in silent.detail
    assert KEY not in f"{refused} {silent} {events} {judge.__dict__['_options']}"
    assert events  # the 503s were logged


async def test_a_missing_api_key_is_an_error_at_the_start(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(RunFailedError, match="JUDGE_KEY, which is not set"):
        async with Judge("http://127.0.0.1:1", "m", client={"api_key_env": "JUDGE_KEY"}):
            raise AssertionError


async def test_requests_are_limited_and_scores_stay_in_order():
    def say(_, request):
        return f"Score: {request['messages'][-1]['content']}"

    async with judging(say, prompt_template="{completion}", client={"max_concurrency": 3}) as (chat, judge):
        rewards = await judge(["p"] * 30, [str(1 + i % 10) for i in range(30)])
    assert rewards == [Measured((i % 10) / 9) for i in range(30)]
    assert chat.most <= 3


async def test_an_outage_is_retried_and_a_refusal_is_not():
    async with judging(lambda *_: 429, client={"max_attempts": 2}) as (chat, judge):
        await judge(["p"], ["c"])
        assert len(chat.asked) == 2
        chat.say = lambda *_: 422
        await judge(["p"], ["c"])
        assert len(chat.asked) == 4  # the refused request, and the control question


@pytest.mark.parametrize(("named_s", "waited_s"), [("1", 1.0), ("600", 1.2)])
async def test_a_rate_limited_server_is_asked_again_when_it_says_but_within_the_timeout(named_s, waited_s, monkeypatch):
    monkeypatch.setattr("envs.remote.service_client.RETRY_BACKOFF", Backoff(0.001, 0.001))
    async with judging(lambda number, _: "Score: 10" if number else 429, client={"timeout_s": 1.2}) as (chat, judge):
        chat.answer_headers = {"Retry-After": named_s}
        began = anyio.current_time()
        assert await judge(["p"], ["c"]) == [Measured(1.0)]
        assert anyio.current_time() - began >= waited_s
    assert len(chat.asked) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"scale": [1]}, "scale"),
        ({"scale": [3, 3]}, "scale"),
        ({"score_pattern": "score"}, "no group"),
        ({"score_pattern": "(["}, "regular expression"),
        ({"client": {"max_concurrency": 0}}, "max_concurrency"),
        ({"client": {"retries": 0}}, "retries"),
        ({"rubric": "x"}, "rubric"),
    ],
    ids=str,
)
def test_wrong_arguments_are_errors_at_the_start(args, words):
    with pytest.raises(ReferenceNotFoundError, match=words):
        RewardFunction.load("judge", args={"url": "http://judge", "model": "m"} | args)


async def test_it_runs_as_a_reward_function_among_others():
    async with judging(lambda *_: "Score: 10") as (_, judge):
        function = RewardFunction(judge, "judge")
        batch = RewardBatch(["p"] * 2, ["a", "b"], [[1]] * 2, columns={"answer": ["4", "5"]})
        assert await function(batch, 10) == [Measured(1.0)] * 2
