"""`reward_model` against a scripted server: its requests, the replies that it accepts, and its failure reasons."""

from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from envs.remote.reward_model import RewardModel
from envs.remote.service_client import HARMLESS_ANSWER
from envs.rewards import RewardBatch, RewardFunction
from stream.errors import RunFailedError, ServiceUnavailableError
from stream.validity import Measured, RewardReason, Unmeasured
from tests.reward_server import RewardServer, answer, by_length, reward_server

ATTEMPTS = 3


@asynccontextmanager
async def model_of(*servers: RewardServer, timeout_s=2.0, max_attempts=ATTEMPTS, **args):
    client = {"timeout_s": timeout_s, "max_attempts": max_attempts}
    args = {"startup_timeout_s": 5.0, "client": client} | args
    async with RewardModel([server.url for server in servers], **args) as model:
        yield model


def value(text: str) -> Measured:
    return Measured(by_length([{"content": text}]))


async def test_it_is_found_by_its_name_and_scores_texts_and_messages_as_whole_conversations():
    async with reward_server() as server:
        load = partial(RewardFunction.load, "reward_model", args={"urls": [server.url]})
        function = await anyio.to_thread.run_sync(load)
        async with function.open():
            texts = RewardBatch(["2 + 2?"] * 3, ["4", "four", "I do not know"], [[1]] * 3, columns={"answer": [4] * 3})
            assert await function(texts, 10) == [value("4"), value("four"), value("I do not know")]
            call = {"function": {"name": "add", "arguments": {"a": 1}}}
            turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
            chats = RewardBatch(
                [[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]], [turns], [[1]]
            )
            assert await function(chats, 10) == [value("3")]
    first, *_, last = sorted(server.asked, key=lambda body: len(body["messages"]))
    assert first == {
        "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
        "use_activation": False,
    }
    assert [message["role"] for message in last["messages"]] == ["system", "user", "assistant", "tool"]
    assert last["messages"][2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


async def test_requests_of_several_groups_are_sent_together():
    with capture_logs() as events:
        async with reward_server() as server, model_of(server, max_batch_size=32, batch_wait_ms=2_000) as model:
            server.together = 32  # four groups of eight: no answer until all have arrived
            with anyio.fail_after(10):
                async with anyio.create_task_group() as groups:
                    for group in range(4):
                        groups.start_soon(model, [f"{group}"] * 8, ["x"] * 8)
    (served,) = [event for event in events if event["event"] == "reward_model.served"]
    assert (served["batch_max"], served["batch_mean"], served["scored"], served["errors"]) == (32, 32.0, 32, {})
    assert served["score_mean"] == served["score_min"] == served["score_max"] == value("x").value


async def test_a_single_conversation_waits_only_batch_wait_ms():
    async with reward_server() as server, model_of(server, max_batch_size=32, batch_wait_ms=1) as model:
        with anyio.fail_after(5):
            assert await model(["p"], ["one"]) == [value("one")]


async def test_concurrent_requests_are_limited_and_spread_over_the_servers():
    async with (
        reward_server() as one,
        reward_server() as two,
        model_of(one, two, max_batch_size=4, batch_wait_ms=0) as model,
    ):
        one.together = two.together = 1_000  # no answer until the test allows it
        results: list[object] = []

        async def ask() -> None:
            results.extend(await model(["p"] * 100, [str(i) for i in range(100)]))

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                while (one.under_way, two.under_way) != (16, 16):  # four batches of four for each
                    await anyio.lowlevel.checkpoint()
                for _ in range(100):  # further requests would arrive now
                    await anyio.lowlevel.checkpoint()
                assert (one.under_way, two.under_way) == (16, 16)
                one.release.set()
                two.release.set()
    assert results == [value(str(i)) for i in range(100)]
    assert len(one.asked) + len(two.asked) == 100


@pytest.mark.parametrize("fault", [500, 503, 429, 408, "hang", "reset"])
async def test_transient_errors_are_retried(fault):
    async with reward_server() as server, model_of(server, timeout_s=0.3) as model:
        server.fault = lambda number, _: fault if number == 0 else None
        assert await model(["p"], ["right"]) == [value("right")]
    assert len(server.asked) == 2


@pytest.mark.parametrize("fault", [500, "hang", "reset"])
async def test_an_outage_is_unavailable_after_max_attempts(fault):
    async with reward_server() as server, model_of(server, timeout_s=0.2) as model:
        server.fault = lambda *_: fault
        rewards = await model(["p"] * 2, ["a", "b"])
    assert [type(reward) for reward in rewards] == [Unmeasured] * 2
    assert {reward.reason for reward in rewards} == {RewardReason.UNAVAILABLE}
    assert len(server.asked) == 2 * ATTEMPTS


async def test_another_server_answers_while_one_is_away():
    async with reward_server() as away, reward_server() as here, model_of(away, here, max_attempts=2) as model:
        away.fault = lambda *_: "reset"
        assert await model(["p"], ["right"]) == [value("right")]
        assert (len(away.asked), len(here.asked)) == (1, 1)
        assert await model(["p"] * 20, ["right"] * 20) == [value("right")] * 20


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_a_refusal_affects_one_row_and_is_not_retried(status):
    async with reward_server() as server, model_of(server) as model:
        server.fault = lambda _, messages: status if messages[-1]["content"] == "too long" else None
        first, second, third = await model(["p"] * 3, ["a", "too long", "c"])
    assert (first, third) == (value("a"), value("c"))
    assert second.reason is RewardReason.RAISED
    assert f"status {status}, said the server" in second.detail
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (400, RewardReason.RAISED),
        (answer(), RewardReason.SHAPE),
        (answer([None]), RewardReason.NOT_FINITE),
    ],
)
async def test_a_text_that_keeps_a_working_model_from_a_score_has_the_worst_one_if_it_is_known(fault, reason):
    async with reward_server() as server, model_of(server, worst_score=-20) as model:
        server.fault = lambda _, messages: fault if messages[-1]["content"] == "too long" else None
        good, bad = await model(["p"] * 2, ["good", "too long"])
        assert (good, (bad.value, bad.reason)) == (value("good"), (-20.0, reason))
        assert server.asked[-1]["messages"][-1]["content"] == HARMLESS_ANSWER
        server.fault = lambda *_: fault  # now the model handles nothing any more
        (unknown,) = await model(["p"], ["too long"])
        assert (type(unknown), unknown.reason) == (Unmeasured, reason)


@pytest.mark.parametrize("models", [{"data": [{"id": "m", "max_model_len": 512}]}, {"data": []}, None])
async def test_it_learns_how_long_a_conversation_the_server_takes(models):
    async with reward_server() as server:
        server.models = models
        async with model_of(server) as model:
            assert model.context_tokens == (512 if models and models["data"] else 0)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (answer(), RewardReason.SHAPE),
        (answer([1.0], [2.0]), RewardReason.SHAPE),
        (answer([0.3, 0.7]), RewardReason.SHAPE),
        (answer([]), RewardReason.SHAPE),
        ("[]", RewardReason.SHAPE),
        ("<html>", RewardReason.SHAPE),
        ('{"data": [{"probs": 3}]}', RewardReason.SHAPE),
        ("[" * 100_000, RewardReason.SHAPE),
        ('{"data": [{"probs": [NaN]}]}', RewardReason.NOT_FINITE),
        ('{"data": [{"probs": [null]}]}', RewardReason.NOT_FINITE),
        ('{"data": [{"probs": [-Infinity]}]}', RewardReason.NOT_FINITE),
        ('{"data": [{"probs": [1e999]}]}', RewardReason.NOT_FINITE),
        ('{"data": [{"probs": ["1"]}]}', RewardReason.NOT_NUMERIC),
    ],
)
async def test_a_response_without_a_score_is_unmeasured(body, reason):
    async with reward_server() as server, model_of(server) as model:
        server.fault = lambda _, messages: body if messages[-1]["content"] == "bad" else None
        good, bad = await model(["p"] * 2, ["good", "bad"])
    assert good == value("good")
    assert bad.reason is reason
    assert len(server.asked) == 2  # it was an answer: no retry


async def test_a_redirect_is_not_followed():
    async with reward_server() as server, model_of(server) as model:
        server.fault = lambda *_: 302
        (reward,) = await model(["p"], ["a"])
    assert reward.reason is RewardReason.UNAVAILABLE
    assert len(server.asked) == 1


async def test_a_cancelled_caller_leaves_no_pending_request():
    async with reward_server() as server, model_of(server, max_batch_size=4, batch_wait_ms=60_000) as model:
        with anyio.move_on_after(0.05):
            await model(["p"] * 3, ["left", "left", "left"])
        with anyio.fail_after(5):
            assert await model(["p"] * 4, list("abcd")) == [value(x) for x in "abcd"]
    assert len(server.asked) == 4


# The probe


@pytest.mark.parametrize("score", [by_length, lambda _: 3.0, lambda _: 0.0], ids=["unlike", "alike", "zero"])
async def test_a_server_whose_activation_is_on_is_refused(score):
    async with reward_server(score) as server:
        server.applies_activation = True
        with pytest.raises(RunFailedError, match=r"passed an activation.*use_activation.*Serve raw logits"):
            async with model_of(server):
                raise AssertionError
    assert server.asked == []


async def test_raw_scores_that_happen_to_lie_between_0_and_1_are_accepted():
    async with reward_server(lambda messages: len(messages[-1]["content"]) / 100) as server, model_of(server) as model:
        assert await model(["p"], ["abc"]) == [Measured(0.03)]


async def test_scores_in_unit_interval_allows_such_a_model():
    async with reward_server() as server:
        server.applies_activation = True
        async with model_of(server, scores_in_unit_interval=True) as model:
            (reward,) = await model(["p"], ["abc"])
    assert 0 < reward.value < 0.01


async def test_one_of_several_servers_that_applies_an_activation_is_enough_to_refuse():
    async with reward_server() as good, reward_server() as bad:
        bad.applies_activation = True
        with pytest.raises(RunFailedError, match=bad.url):
            async with model_of(good, bad):
                raise AssertionError


async def test_servers_of_different_models_are_refused():
    async with reward_server() as one, reward_server(lambda m: by_length(m) + 5) as other:
        with pytest.raises(RunFailedError, match="do not serve the same reward model"):
            async with model_of(one, other):
                raise AssertionError


async def test_a_server_without_a_reward_model_is_refused_with_a_remedy():
    async with reward_server() as server:
        with pytest.raises(RunFailedError, match="--runner pooling"):
            async with RewardModel([server.url + "/v2"]):
                raise AssertionError


async def test_a_missing_server_is_waited_for_and_logged_once(free_tcp_port):
    with capture_logs() as events, pytest.raises(ServiceUnavailableError, match=f"{free_tcp_port}; tried for 0.3 s"):
        async with RewardModel([f"http://127.0.0.1:{free_tcp_port}"], startup_timeout_s=0.3):
            raise AssertionError
    assert [event["event"] for event in events] == ["service.waiting"]


async def test_a_server_that_starts_during_the_wait_is_used(free_tcp_port):
    model = RewardModel([f"http://127.0.0.1:{free_tcp_port}"], startup_timeout_s=20.0)
    async with anyio.create_task_group() as tasks:
        asked = anyio.Event()

        async def use() -> None:
            async with model:
                assert await model(["p"], ["abc"]) == [value("abc")]
            asked.set()

        tasks.start_soon(use)
        await anyio.sleep(0.1)
        async with reward_server(port=free_tcp_port):
            with anyio.fail_after(10):
                await asked.wait()


async def test_a_server_is_checked_again_after_an_outage(free_tcp_port):
    async with reward_server(port=free_tcp_port) as before:
        model = RewardModel([before.url], client={"timeout_s": 2.0, "max_attempts": 2})
        await model.__aenter__()
        assert await model(["p"], ["abc"]) == [value("abc")]
    try:
        (away,) = await model(["p"], ["abc"])
        assert away.reason is RewardReason.UNAVAILABLE
        async with reward_server(port=free_tcp_port) as after:
            after.applies_activation = True
            (refused,) = await model(["p"], ["abc"])
            assert refused.reason is RewardReason.UNAVAILABLE
            assert "passed an activation" in refused.detail
            after.applies_activation = False
            assert await model(["p"], ["abc"]) == [value("abc")]
    finally:
        await model.__aexit__(None, None, None)
