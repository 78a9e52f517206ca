"""A server that accepts weights, its current weights, and the log-probs of each policy according to transformers."""

from functools import cached_property
from pathlib import Path

import aiohttp
import msgspec

from tests.vllm.policies import LENGTH, Judge
from workers.engine_api.discovery import EngineDiscovery
from workers.engine_api.wire import GenerateRequest, GenerateResponse, SamplingParams
from workers.train.publishing.publisher import WeightPublisher
from workers.train.publishing.transport import PausedUpdate, SharedFolderTransfer

CLOSE = 1e-4


class Served:
    """A server, its three policies, and their log-probs according to transformers.

    Tests share it: each pushes the policy it needs, under increasing version numbers.

    Args:
        url: URL of the server.
        folders: folders of the policies; the server starts with the first.
    """

    def __init__(self, url: str, folders: list[Path]) -> None:
        self.url = url
        self.folders = folders
        self.version = -1
        """The last version pushed or named; version v is policy v % 3."""
        self.furthest = 0.0
        """Largest difference of a served log-prob from its policy's, among those that must agree."""
        self._asides = 0

    @cached_property
    def judges(self) -> list[Judge]:
        return [Judge(folder) for folder in self.folders]

    def publisher(self, way=None, patience_s=60.0) -> WeightPublisher:
        way = way or PausedUpdate(SharedFolderTransfer())
        made = WeightPublisher(EngineDiscovery([self.url]), way, retry_timeout_s=patience_s, update_timeout_s=120)
        for target in made._current_targets():
            target.is_compatible = True  # else it probes first, longer than requests last
        return made

    async def push(self, policy: int, publisher: WeightPublisher | None = None) -> int:
        """Push one of the three policies under the next version number that stands for it."""
        version = next(v for v in range(self.version + 1, self.version + 4) if v % 3 == policy)
        await (publisher or self.publisher()).push(self.folders[policy], version)
        self.version = version
        return version

    async def name(self) -> int:
        """Give the current weights the next version number, unchanged."""
        self.version += 1
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/update_weight_version", json={"new_version": str(self.version)}) as response,
        ):
            assert response.status == 200, await response.text()
        return self.version

    async def sample(self, prompt: list[int], tokens: int, seed: int = 0, salt: str = "", ends: str = "length"):
        """Sample one request; returns ids, log-probs and spans, and asserts how it ends."""
        params = SamplingParams(max_tokens=tokens, logprobs=1, ignore_eos=True, seed=seed)
        body = msgspec.json.encode(GenerateRequest(token_ids=prompt, sampling_params=params, cache_salt=salt))
        headers = {"content-type": "application/json"}
        url = f"{self.url}/inference/v1/generate"
        async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as response:
            answer = await response.read()
            assert response.status == 200, answer
        (choice,) = msgspec.json.decode(answer, type=GenerateResponse).choices
        assert choice.finish_reason == ends
        return choice.token_ids, [entry.logprob for entry in choice.logprobs.content], choice.weight_versions

    async def endless(self, prompt: list[int]):
        """Like `sample`, for a request that lasts until `end_endless`."""
        return await self.sample(prompt, LENGTH - len(prompt), ends="abort")

    async def end_endless(self) -> None:
        """Abort all requests in progress; they return the tokens sampled so far."""
        async with aiohttp.ClientSession() as session:
            for path in ("/pause?mode=abort&clear_cache=false", "/resume"):
                async with session.post(self.url + path) as response:
                    assert response.status == 200, await response.text()

    async def differences(self, prompt: list[int], seed: int = 0) -> list[float]:
        """Return how far the served log-probs are from those of each policy."""
        ids, served, _ = await self.sample(prompt, 12, seed)
        return [difference(judge.logprobs(prompt, ids), served) for judge in self.judges]

    async def assert_serves(self, policy: int, prompts: list[list[int]]) -> None:
        """Assert by log-probs, on every prompt, that this policy is served and neither of the others."""
        for prompt in prompts:
            for number, result in enumerate(await self.differences(prompt)):
                assert result < CLOSE if number == policy else result > 1, f"policy {number}: {result}"
                if number == policy:
                    self.furthest = max(self.furthest, result)

    async def count(self, metric: str) -> float:
        """Return a metric's sum over all engines and labels."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(metric + "{"))

    async def while_tokens_are_sampled(self) -> None:
        """Wait while another request samples 50 tokens: requests that started earlier have some tokens then."""
        self._asides += 1
        await self.sample([10 + self._asides % 290, *range(20, 49)], 50)


def difference(expected: list[float], served: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(expected, served, strict=True))
