"""Effect of group affinity on the prefix caches of two vLLM servers."""

import random
import urllib.request

import anyio
import pytest

from tests.vllm.served import Served
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.sampling import SamplingOptions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

GROUPS, SIZE, TURNS = 32, 2, 2
PROMPT, OBSERVED, SAID = 620, 96, 16
"""Tokens in a group's prompt, in each later turn's observation, and in each reply."""


async def counts(servers: list[Served]) -> list[float]:
    """Return the tokens found in a prefix cache, and the tokens looked up."""
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    return [sum([await server.count(name) for server in servers]) for name in names]


async def forget(server: Served) -> None:
    request = urllib.request.Request(f"{server.url}/reset_prefix_cache", b"")
    await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(request, timeout=300).close())


async def hit_rate(servers: list[Served], client: EngineClient, name: str, *, near: bool) -> float:
    """Play groups of several turns; returns the fraction of prompt tokens found in a cache."""
    for server in servers:
        await forget(server)
    before = await counts(servers)
    anywhere = random.Random(name)

    async def play(group: int, completion: int) -> None:
        pick = random.Random(f"{name}-{group}")
        context = [pick.randrange(10, 300) for _ in range(PROMPT)]
        pick = random.Random(f"{name}-{group}-{completion}")
        for turn in range(TURNS):
            of = f"{name}-{group}" if near else f"{anywhere.random()}"
            sampling = SamplingOptions(temperature=1.0, max_tokens=SAID, seed=turn, group=of, completion=completion)
            sample = await client.sample(context, sampling, min_policy_version=-1)
            context += [*sample.token_ids, *(pick.randrange(10, 300) for _ in range(OBSERVED))]

    async with anyio.create_task_group() as tasks:
        for completion in range(SIZE):  # one at a time: in one batch, neither finds the other in a cache
            for group in range(GROUPS):
                tasks.start_soon(play, group, completion)
    hits, queries = (b - a for a, b in zip(before, await counts(servers), strict=True))
    return hits / queries


async def test_affinity_has_a_higher_prefix_cache_hit_rate_than_random_routing(tied, untied, measured):
    """Both servers use vLLM's cache; their different weights change the replies but not the hits."""
    servers, rates = [tied, untied], {}
    options = {"request_timeout_s": 300, "max_attempts": 3, "unavailable_timeout_s": 120}
    async with EngineClient([server.url for server in servers], **options) as client:
        await client.wait_until_ready()
        for name in ("random", "near"):
            rates[name] = await hit_rate(servers, client, name, near=name == "near")
    measured(f"prefix cache hits near {rates['near']:.3f}, at random {rates['random']:.3f}")
    # Of four visits three find the prompt; at random 1/2 + 3/4 + 7/8 do. Chance moves each by a hundredth or two.
    assert rates["near"] > rates["random"] + 0.06
