"""A probe detects the raw log-probs of a vLLM with default flags."""

import pytest
import torch

from stream.errors import EngineError
from tests.vllm.served import CLOSE
from tests.vllm.test_sampling_on_vllm import cancel_in_the_middle, one_row, without_generate
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.sampling import SamplingOptions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def client_of(url, *samplings):
    return EngineClient(
        [url], request_timeout_s=300, max_attempts=1, unavailable_timeout_s=120, sampling_options=samplings
    )


async def test_raw_logprobs_equal_processed_ones_at_temperature_1(untied, measured):
    await untied.push(1)
    sampling = SamplingOptions(temperature=1.0, max_tokens=24)
    async with client_of(untied.url, sampling, SamplingOptions(temperature=0.0, max_tokens=1)) as client:
        await client.wait_until_ready()
        sampled = await client.sample([5, 60, 9], sampling, min_policy_version=-1)
    ours = one_row(untied.judges[1].model, [5, 60, 9], sampled, 1.0)
    furthest = torch.tensor(sampled.logprobs).sub(ours).abs().max().item()
    measured(f"largest difference from transformers {furthest:.1e}")
    assert furthest < CLOSE


async def test_a_server_whose_logprobs_cannot_be_probed_is_refused_with_the_flag(lora):
    async with client_of(lora.url, SamplingOptions(temperature=0.7, max_tokens=1)) as client:
        with pytest.raises(EngineError, match=r"--max-logprobs 3"):
            await client.wait_until_ready()


async def test_raw_logprobs_are_refused_at_another_temperature_over_both_routes(untied):
    async with without_generate(untied.url) as proxy:
        for url in (untied.url, proxy):
            async with client_of(url, SamplingOptions(temperature=0.7, max_tokens=1)) as client:
                with pytest.raises(EngineError, match=r"raw logits.*--logprobs-mode processed_logprobs") as refused:
                    await client.wait_until_ready()
            assert url in str(refused.value)


async def test_a_cancelled_completion_ends_at_the_engine(untied):
    """The server is behind a proxy, through which vLLM must notice the cancellation as well."""
    async with without_generate(untied.url) as proxy, client_of(proxy) as client:
        await client.wait_until_ready()
        await cancel_in_the_middle(untied.url, client)
