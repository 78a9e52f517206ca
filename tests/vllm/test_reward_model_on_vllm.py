"""`reward_model` on real vLLM: scores equal transformers' logits in any batch, and the probe detects wrong servers."""

import json

import aiohttp
import anyio
import pytest
from aiohttp import web
from click.testing import CliRunner

from envs.remote.reward_model import RewardModel
from stream.errors import RunFailedError
from stream.validity import Measured, RewardReason
from tests.integration.test_pooling_engine import conversations
from tests.integration.test_rewardbench import rows, write
from workers.cli import penstock
from workers.engine_api.http_server import listen
from workers.local_engine.pooling.classifier import ReferenceClassifier

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
CLOSE = 1e-4


@pytest.fixture
def url(pooling):
    return pooling.url


@pytest.fixture
def folder(pooling):
    return pooling.folders[0]


def split(chats):
    return [chat[:1] for chat in chats], [chat[1:] for chat in chats]


async def test_scores_equal_transformers_alone_together_and_in_another_order(url, folder, measured):
    chats = conversations(40)
    plain = await anyio.to_thread.run_sync(ReferenceClassifier, folder)
    expected = [plain.score(chat) for chat in chats]
    assert max(expected) - min(expected) > 2
    async with RewardModel([url], client={"timeout_s": 300}) as model:
        together = await model(*split(chats))
        backwards = (await model(*split(chats[::-1])))[::-1]
        alone = [(await model(*split([chat])))[0] for chat in chats[:8]]
    furthest = max(abs(reward.value - right) for reward, right in zip(together, expected, strict=True))
    measured(f"largest difference from transformers {furthest:.1e}")
    assert [reward.value for reward in together] == pytest.approx(expected, abs=CLOSE)
    assert [reward.value for reward in backwards] == pytest.approx(expected, abs=CLOSE)
    assert [reward.value for reward in alone] == pytest.approx(expected[:8], abs=CLOSE)


async def test_a_conversation_that_is_too_long_fails_alone_with_vllms_message(url):
    async with RewardModel([url], client={"timeout_s": 300}) as model:
        good, long = await model(["p", "p"], ["a", "1 " * 600])
    assert isinstance(good, Measured)
    assert long.reason is RewardReason.RAISED
    assert "maximum context length is 512 tokens" in long.detail


async def test_vllm_behind_a_proxy_that_drops_use_activation_is_refused(url):
    """vLLM's default is on, so every score would be a sigmoid."""
    async with aiohttp.ClientSession() as session:

        async def drop(http: web.Request) -> web.Response:
            body = json.loads(await http.read())
            body.pop("use_activation")
            async with session.post(f"{url}/classify", json=body) as response:
                return web.Response(status=response.status, body=await response.read())

        app = web.Application()
        app.router.add_post("/classify", drop)
        async with listen(app, "127.0.0.1", 0) as proxy:
            with pytest.raises(RunFailedError, match="passed an activation"):
                async with RewardModel([proxy], client={"timeout_s": 300}):
                    raise AssertionError


def test_rewardbench_on_vllm_agrees_with_transformers_pair_by_pair(url, folder, tmp_path):
    file = write(tmp_path / "bench.jsonl", rows(2))
    result = CliRunner().invoke(
        penstock, ["rewardbench", str(file), "--url", url, "--reference", str(folder), "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert len(report["subsets"]) == 23
    assert all(s["agreeing"] == s["pairs"] == 2 for s in report["subsets"])
    assert report["sections"] == report["reference_sections"]
    assert report["largest_difference"] < CLOSE
