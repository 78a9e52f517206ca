"""What `penstock export` writes, on vLLM: the merged model as a server's model, the adapter on a server of its base."""

from pathlib import Path

import aiohttp
import anyio
import pytest

from tests.cases.groups import completion, group
from tests.vllm.policies import Judge
from tests.vllm.served import CLOSE, difference
from tests.vllm.server import vllm_server
from workers.runs.progress import Progress
from workers.settings.toml_file import parse_settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.checkpointing.export import export
from workers.train.step.batch import collate
from workers.train.step.learner import Learner

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PROMPT = [11, 40, 7, 99, 23, 250, 64]
APART = 1e-2


async def sample(url: str, model: str = "") -> tuple[list[int], list[float]]:
    """Sample from a model or an adapter that the server knows; return ids and log-probs."""
    params = {"max_tokens": 12, "logprobs": 0, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": params} | ({"model": model} if model else {})
    async with aiohttp.ClientSession() as session, session.post(f"{url}/inference/v1/generate", json=body) as response:
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


async def sample_with_adapter(url: str, folder: Path) -> tuple[list[int], list[float]]:
    """Sample with an adapter that the server, which other tests use too, has for this time only."""
    body = {"lora_name": "exported", "lora_path": str(folder)}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/load_lora_adapter", json=body) as response:
            assert response.status == 200, await response.text()
        sampled = await sample(url, "exported")
        async with session.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "exported"}) as response:
            assert response.status == 200, await response.text()
    return sampled


def test_the_exported_model_and_the_exported_adapter_serve_the_trained_policy(lora, tmp_path, measured):
    base = lora.folders[0]
    settings = parse_settings(
        {
            "model": {"path": str(base)},
            "data": {"path": "none"},
            "environments": {"a": "calculator"},
            "lora": {"rank": 4, "alpha": 8.0},
            "train": {"learning_rate": 3e-2, "max_grad_norm": 1e9},
        }
    )
    learner = Learner(settings)
    for step in range(4):
        rolled = [completion(0, 1.0, [30, 31 + step], version=3), completion(1, 0.0, [41, 42], version=3)]
        assert learner.step(collate([group(*rolled)]), 3).trained
    CheckpointStore(tmp_path / "checkpoints").save(4, learner, Progress(step=4))
    out = tmp_path / "out"
    export(tmp_path, out)
    trained, before = Judge(out), Judge(base)

    with vllm_server(out, tmp_path / "vllm.log", "--enable-scale-out", "--max-model-len", "256") as merged:
        for name, (ids, served) in {
            "adapter": anyio.run(sample_with_adapter, lora.url, out / "adapter"),
            "merged model": anyio.run(sample, merged),
        }.items():
            off = difference(trained.logprobs(PROMPT, ids), served)
            measured(f"{name}: largest difference from transformers {off:.1e}")
            assert off < CLOSE, name
            assert difference(before.logprobs(PROMPT, ids), served) > APART, "nothing could be told apart"
