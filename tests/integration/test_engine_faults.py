"""Each fault of an engine: its effect on the completion, on the other completions of the group, and on the log."""

import sys
from functools import partial
from typing import get_args

import anyio
import pytest
from structlog.testing import capture_logs

from envs.factory import EnvironmentFactory
from envs.references import Reference
from stream.codec import decode, encode
from stream.errors import EngineUnavailableError
from stream.records import Group, Prompt
from stream.validity import Measured, RolloutReason
from tests.cases import engines
from tests.scripted_engine.answers import Fault
from tests.scripted_engine.engine import ScriptedEngine
from tests.soak.project import END, write_project
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.router import rank_engines
from workers.rollout.engine_client.sampling import SamplingOptions
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import RolloutSettings

FAULTS = get_args(Fault)
RETRIED = [fault for fault in FAULTS if fault != "400"]
ATTEMPTS = 3
SAMPLING = SamplingOptions(temperature=1.0, max_tokens=8)


def reply(token_ids: list[int], _request) -> list[int]:
    return [*token_ids[-1:], END]


class Numbered:
    """Returns the completion's index as its observation, so an engine can tell completions apart."""

    def reset(self, completion_index):
        return str(completion_index)

    def get_reward(self):
        return 1.0


client_of = partial(engines.client_of, attempts=ATTEMPTS, timeout_s=0.3)


async def group_of(client: EngineClient, folder, size: int, name: str = "d:0:0") -> Group:
    """Roll out a group; each completion's prompt is 5 and its index."""
    await anyio.to_thread.run_sync(write_project, folder, 1, 1)
    chat = await anyio.to_thread.run_sync(ChatTokenizer.load, folder / "model", {}, None)
    factory = EnvironmentFactory(Reference("test", "module", Numbered, sys.modules[__name__]), Numbered, Numbered())
    prompt = Prompt(
        id=name, messages=[{"role": "user", "content": "5"}], environment="numbered", group_size=size, seed=1
    )
    async with EnvironmentPool({"numbered": factory}, size=size) as pool:
        group = await GroupRunner(
            chats={prompt.environment: ChatSetup(chat, TOOL_FORMATS["hermes"])},
            sampler=client,
            pool=pool,
            limits=RolloutSettings(max_tokens=16, max_tokens_per_turn=16),
            factories={"numbered": factory},
        ).run(prompt)
    return decode(encode(group), Group)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "busy"])
async def test_a_fault_at_every_attempt_fails_one_completion_and_not_the_others(tmp_path, fault):
    async with ScriptedEngine(reply, version="0") as engine, client_of(engine) as client:
        engine.faults = lambda _, request: fault if request.token_ids[-1] == 2 else None
        group = await group_of(client, tmp_path, size=4)
    assert [c.failure and c.failure.reason for c in group.completions] == [None, None, RolloutReason.ENGINE, None]
    failed = group.completions.pop(2)
    assert failed.failure.detail
    assert (failed.rows, failed.parts, failed.snapshot) == ([], [], None)
    for completion in group.completions:
        assert [part.reward for part in completion.parts] == [Measured(1.0)]
        assert completion.rows[0].tokens.tolist() == [completion.index, END]
    tries = [request.token_ids[-1] for request in engine.requests].count(2)
    assert tries == (1 if fault == "400" else ATTEMPTS)


@pytest.mark.parametrize("fault", RETRIED)
async def test_a_request_that_one_engine_keeps_failing_is_answered_by_another(tmp_path, fault):
    async with (
        ScriptedEngine(reply, version="0") as bad,
        ScriptedEngine(reply, version="0") as good,
        client_of(bad, good) as client,
    ):
        bad.faults = lambda *_: fault
        await client.wait_until_ready()
        named = next(name for name in map(str, range(99)) if rank_engines(name, (bad.url, good.url))[0] == bad.url)
        group = await group_of(client, tmp_path, size=4, name=named)
    assert [completion.failure for completion in group.completions] == [None] * 4
    assert bad.request_count
    assert good.request_count == 4
    # Each moved to the other engine after one failure.
    assert len({tuple(request.token_ids) for request in bad.requests}) == bad.request_count


async def test_a_group_that_every_engine_is_too_busy_for_is_given_back_whole(tmp_path):
    async with ScriptedEngine(reply, version="0") as engine, client_of(engine) as client:
        engine.faults = lambda _, request: "busy" if request.token_ids[-1] == 2 else None
        with pytest.raises(EngineUnavailableError, match="503: busy, for"):
            await group_of(client, tmp_path, size=4)


async def test_a_400_is_not_sent_to_another_engine():
    async with (
        ScriptedEngine(reply, version="0") as one,
        ScriptedEngine(reply, version="0") as other,
        client_of(one, other) as client,
    ):
        one.faults = other.faults = lambda *_: "400"
        with pytest.raises(Exception, match="scripted 400"):
            await client.sample([1], SAMPLING)
    assert one.request_count + other.request_count == 1


async def test_a_group_whose_completions_all_fail_is_still_a_group(tmp_path):
    async with ScriptedEngine(reply, version="0") as engine, client_of(engine) as client:
        engine.faults = lambda *_: "500"
        group = await group_of(client, tmp_path, size=3)
    assert [completion.failure.reason for completion in group.completions] == [RolloutReason.ENGINE] * 3


# Log events


async def test_many_requests_waiting_for_weights_poll_rarely_and_log_once():
    async with ScriptedEngine(reply, version=None) as engine, client_of(engine, timeout_s=5) as client:
        with capture_logs() as lines, anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(60):
                    tasks.start_soon(client.sample, [1], SAMPLING)
                began = anyio.current_time()
                await anyio.sleep(2.0)
                asked, took = engine.query_counts["/weight_info"], anyio.current_time() - began
                engine.version = "0"
    lines = [line for line in lines if line["event"] != "engine.found"]
    assert [(line["event"], line["what"]) for line in lines] == [
        ("engine.waiting", "weights"),
        ("engine.recovered", "weights"),
    ]
    assert "no policy version yet" in lines[0]["why"]
    # Each request polls once; after that all share one poll every half second.
    assert asked <= 60 + took / 0.5 + 1


async def test_many_requests_waiting_for_an_engine_log_once():
    async with ScriptedEngine(reply, version="0") as engine:
        port = int(engine.url.rpartition(":")[2])
    async with client_of(engine, timeout_s=5) as client:
        with capture_logs() as lines, anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.wait_until_ready)
                for _ in range(60):
                    tasks.start_soon(client.sample, [1], SAMPLING)
                await anyio.sleep(1.0)
                async with ScriptedEngine(reply, version="0", port=port) as engine:
                    while engine.request_count < 60:
                        await anyio.sleep(0.02)
                    await anyio.sleep(0.1)
    assert [line["event"] for line in lines if line["event"] != "engine.found"] == [
        "engine.waiting",
        "engine.recovered",
    ]
