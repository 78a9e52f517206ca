"""What a probe finds out of a vLLM as most people start it: raw log-probs, and no route but completions."""

import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM

from stream.errors import EngineError
from tests.vllm.server import vllm_server
from tests.vllm.steady_model import make_steady_model
from tests.vllm.test_sampling_on_vllm import CLOSE, LENGTH, cancel_in_the_middle, one_row
from workers.rollout.engine.client import EngineClient
from workers.rollout.engine.sampling import Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_steady_model(path, seed=3)
    return path


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with vllm_server(folder, log, "--max-model-len", str(LENGTH), "--max-logprobs", "2") as found:
        yield found


def client_of(url, *samplings):
    return EngineClient([url], request_timeout_s=60, attempts=1, reconnect_s=10, samplings=samplings)


async def test_raw_logprobs_are_those_of_what_is_sampled_at_temperature_1(url, folder):
    model = await anyio.to_thread.run_sync(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    sampling = Sampling(temperature=1.0, max_tokens=24)
    async with client_of(url, sampling, Sampling(temperature=0.0, max_tokens=1)) as client:
        await client.probe()
        sampled = await client.sample([5, 60, 9], sampling, at_least=-1)
    assert torch.tensor(sampled.logprobs).sub(one_row(model, [5, 60, 9], sampled, 1.0)).abs().max() < CLOSE


async def test_a_server_that_cannot_be_asked_what_its_logprobs_are_of_is_refused_with_the_flag(url):
    async with client_of(url, Sampling(temperature=0.7, max_tokens=1)) as client:
        with pytest.raises(EngineError, match=r"--max-logprobs 3"):
            await client.probe()


async def test_raw_logprobs_are_refused_at_another_temperature(url, monkeypatch):
    monkeypatch.setattr("workers.rollout.engine.probe._ALTERNATIVES", 2)
    async with client_of(url, Sampling(temperature=0.7, max_tokens=1)) as client:
        with pytest.raises(EngineError, match=r"raw logits.*--logprobs-mode processed_logprobs") as refused:
            await client.probe()
    assert url in str(refused.value)


async def test_a_cancelled_completion_ends_at_the_engine(url):
    async with client_of(url) as client:
        await client.probe()
        await cancel_in_the_middle(url, client)
