"""Adapters pushed into a real vLLM: samples come from the new version, in flight and at rest."""

import contextlib
from functools import partial
from pathlib import Path

import aiohttp
import anyio
import pytest
import torch

from stream.errors import EngineRefusedError
from tests.vllm.policies import LENGTH, MANY, Judge
from tests.vllm.served import CLOSE
from workers.engine_api.discovery import EngineDiscovery
from workers.engine_api.wire import adapter_name
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.sampling import SamplingOptions
from workers.settings import LoraSettings
from workers.train.model.adapter import Adapter
from workers.train.model.policy_folder import load_policy, save_policy
from workers.train.publishing.adapter_update import AdapterUpdate
from workers.train.publishing.engine_control import EngineControlClient
from workers.train.publishing.publisher import WeightPublisher

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

RANK = 4
VERSIONS = 14
LONG = 700
"""Tokens of a prompt that spans many blocks of the prefix cache."""


class Versions:
    """Adapters of one base model, all different, and the log-probs of each, merged, according to transformers."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.paths = [folder / f"v{version:06d}" for version in range(VERSIONS)]
        adapter = Adapter(load_policy(base), base, LoraSettings(rank=RANK, alpha=8.0), seed=0)
        self.judges = []
        for version, path in enumerate(self.paths):
            generator = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for parameter in adapter.parameters.values():
                    parameter.normal_(0.0, 0.15, generator=generator)
            merged = folder / f"merged-{version}"
            for made in (path, merged):
                made.mkdir()
            adapter.save(path, "float32")
            save_policy(adapter.model, adapter.merged_state(), base, merged, "float32")
            self.judges.append(Judge(merged))

    def differs(self, prompt, sampled, version: int) -> float:
        """Return the largest difference of a served log-prob from that version's."""
        right = self.judges[version].logprobs(prompt, sampled.token_ids)
        return max(abs(ours - theirs) for ours, theirs in zip(sampled.logprobs, right, strict=True))


@pytest.fixture(scope="session")
def made() -> dict[str, Versions]:
    return {}


@pytest.fixture
def versions(lora, made, tmp_path_factory) -> Versions:
    """Made once: the tests share a server, on which no version number is used twice."""
    if lora.url not in made:
        made[lora.url] = Versions(lora.folders[0], tmp_path_factory.mktemp("lora"))
    return made[lora.url]


@pytest.fixture
def url(lora):
    return lora.url


@pytest.fixture
def publisher(url):
    return WeightPublisher(EngineDiscovery((url,)), AdapterUpdate(RANK), retry_timeout_s=60, update_timeout_s=120)


@contextlib.asynccontextmanager
async def client_of(url):
    async with EngineClient(
        [url], request_timeout_s=300, max_attempts=3, unavailable_timeout_s=120, uses_adapters=True
    ) as client:
        yield client


def prompt(seed: int, length: int = LONG) -> list[int]:
    return torch.randint(10, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def sample(client, ids, tokens=24, *, seed=1, min_policy_version=0, least=0):
    sampling = SamplingOptions(temperature=1.0, max_tokens=tokens, min_tokens=least, seed=seed)
    return await client.sample(ids, sampling, min_policy_version=min_policy_version)


async def next_version(publisher) -> int:
    (has,) = (await publisher.engine_versions()).values()
    return 0 if has is None else has + 1


async def test_each_version_equals_transformers_on_prompts_cached_by_the_previous_version(
    url, publisher, versions, measured
):
    first, furthest = await next_version(publisher), 0.0
    async with client_of(url) as client:
        for version in range(first, first + 3):
            path = versions.paths[version]
            await publisher.push(path, version)
            assert await publisher.engine_versions() == {url: version}
            for seed in range(3):
                sampled = await sample(client, prompt(seed), seed=seed, min_policy_version=version)
                assert {span.version for span in sampled.spans} == {version}
                furthest = max(furthest, versions.differs(prompt(seed), sampled, version))
                assert furthest < CLOSE
                if version > first:
                    assert versions.differs(prompt(seed), sampled, version - 1) > 0.1, "nothing could be told apart"
    measured(f"largest difference from transformers {furthest:.1e}")
    kept = await EngineControlClient(url, 120).loaded_adapters()
    assert set(kept) == {adapter_name(version) for version in (first + 1, first + 2)}


async def test_running_requests_keep_their_adapter_to_the_last_token(url, publisher, versions):
    first = await next_version(publisher)
    sampled, ids = {}, [prompt(seed) for seed in range(4)]

    async def one(client, place, version):
        sampled[place] = await sample(client, ids[place], MANY, seed=place, min_policy_version=version, least=MANY)

    async with client_of(url) as client:
        await publisher.push(versions.paths[first], first)
        before = await generated(url)
        async with anyio.create_task_group() as tasks:
            for place in (0, 1):
                tasks.start_soon(one, client, place, first)
            await further(url, before + 20)
            await post(url, "/pause?mode=keep&clear_cache=false")  # so that the requests do not end meanwhile
            try:
                for version in range(first + 1, first + 4):  # the first name is removed after two later versions
                    await publisher.push(versions.paths[version], version)
                assert not sampled, "they had ended before anything was pushed"
                for place in (2, 3):
                    tasks.start_soon(one, client, place, first + 3)
            finally:
                await post(url, "/resume")
    for place, result in sampled.items():
        version = first if place < 2 else first + 3
        assert [span.version for span in result.spans] == [version]
        assert versions.differs(ids[place], result, version) < CLOSE


async def post(url: str, path: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(url + path) as response:
        assert response.status == 200, await response.text()


async def further(url: str, tokens: float) -> None:
    """Wait until the server has sampled `tokens` more tokens."""
    with anyio.fail_after(300):
        while await generated(url) < tokens:
            await anyio.sleep(0.02)


async def generated(url: str) -> float:
    """Return the number of tokens that the server has sampled."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


async def test_a_request_for_an_unloaded_adapter_is_retried_with_the_new_one(url, publisher, versions):
    first = await next_version(publisher)
    async with client_of(url) as client:
        await publisher.push(versions.paths[first], first)
        await sample(client, prompt(0, 20), 2, min_policy_version=first)
        control = EngineControlClient(url, 120)
        await publisher.push(versions.paths[first + 1], first + 1)
        await control.unload_adapter(adapter_name(first))
        result = await sample(client, prompt(0, 20), 8)  # the client still expects the adapter it last saw
    assert {span.version for span in result.spans} == {first + 1}
    assert versions.differs(prompt(0, 20), result, first + 1) < CLOSE


async def test_replacing_an_adapter_under_its_name_is_wrong_for_running_requests(url, publisher, versions):
    """Why it is not used: vLLM reports the new version, but samples from a mixture or from the old one."""
    first = await next_version(publisher)
    ids, control = prompt(5), EngineControlClient(url, 120)
    async with aiohttp.ClientSession() as session:
        load = partial(_load_in_place, session, url)
        for version in (first, first + 1):
            await load(versions.paths[version])
            body = {
                "model": "replaced",
                "token_ids": ids,
                "sampling_params": {
                    "max_tokens": LENGTH - LONG,
                    "logprobs": 0,
                    "temperature": 1.0,
                    "seed": 1,
                    "ignore_eos": True,
                },
            }
            async with anyio.create_task_group() as tasks:
                answer = {}

                async def ask(answer=answer, body=body):
                    async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                        answer.update((await response.json())["choices"][0])

                before = await generated(url)
                tasks.start_soon(ask)
                await further(url, before + 5)
                await load(versions.paths[version + 1])
                await control.set_weight_version(version + 1)
                await further(url, await generated(url) + 200)
                await post(url, "/pause?mode=abort")
                await post(url, "/resume")
            spans = {span["version"] for span in answer["weight_versions"]}
            assert str(version + 1) in spans
            served = [entry["logprob"] for entry in answer["logprobs"]["content"]]
            new = versions.judges[version + 1].logprobs(ids, answer["token_ids"])
            last = answer["weight_versions"][-1]
            span_range = range(last["start"], last["end"])
            assert max(abs(served[i] - new[i]) for i in span_range) > 0.1


async def _load_in_place(session, url, path):
    body = {"lora_name": "replaced", "lora_path": str(path), "load_inplace": True}
    async with session.post(f"{url}/v1/load_lora_adapter", json=body) as response:
        assert response.status == 200, await response.text()


async def test_a_folder_that_the_engine_cannot_read_is_refused_immediately(publisher):
    with anyio.fail_after(50), pytest.raises(EngineRefusedError, match=r"finds no adapter at .*/nowhere/v000099"):
        await publisher.push(Path("/nowhere/v000099"), 99)


async def test_an_engine_that_cannot_load_the_adapter_is_refused_with_the_options(url, versions):
    publisher = WeightPublisher(EngineDiscovery((url,)), AdapterUpdate(16), retry_timeout_s=60, update_timeout_s=120)
    with pytest.raises(EngineRefusedError, match=r"--max-lora-rank 8, less than lora\.rank \(16\)"):
        await publisher.push(versions.paths[1], 1)
