"""The engine client against real vLLM, over both of its routes: samples, reported facts, and errors.

The server returns processed log-probs; the one in `test_raw_logprobs_on_vllm.py` returns raw ones.
"""

import re
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import anyio
import pytest
import torch
from aiohttp import web
from structlog.testing import capture_logs

from stream.errors import EngineError, EngineRefusedError
from stream.records import Failure, Span
from stream.validity import RolloutReason, TruncationReason
from tests.base_models.demo_model import make_tokenizer
from tests.vllm.policies import LENGTH, MANY
from tests.vllm.served import CLOSE
from workers.engine_api.http_server import listen
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.sampling import SamplingOptions, end_after_error, turn_seed
from workers.rollout.engine_client.sampling_apis import CompletionsApi, GenerateApi
from workers.train.model.logprobs import LogprobModel, token_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
ROUTES = ["generate", "completions"]
RUNNING = r"num_requests_running{[^}]*}"
GENERATED = r"generation_tokens_total{[^}]*}"
# Seconds of sampling, so that tests can act while a request is in progress.
LONG = SamplingOptions(temperature=1.0, max_tokens=LENGTH - 10, min_tokens=LENGTH - 10)
PROMPTS = [[5 + i, 40 + 7 * i, 9, 100 + i] * (1 + i % 3) for i in range(16)]


@pytest.fixture
async def model(tied):
    """Policy 0, pushed to the server to replace whatever an earlier test left."""
    await tied.push(0)
    return tied.judges[0].model


@pytest.fixture
def url(tied, model):
    return tied.url


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@asynccontextmanager
async def without_generate(url):
    """The same server, behaving as one started without `--enable-scale-out`."""
    async with aiohttp.ClientSession() as session:

        async def pass_on(http: web.Request) -> web.Response:
            if http.path == GenerateApi.path:
                return web.Response(status=404)
            headers = {"Content-Type": "application/json"}
            async with session.request(
                http.method, url + http.path_qs, data=await http.read(), headers=headers
            ) as response:
                return web.Response(status=response.status, body=await response.read())

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", pass_on)
        async with listen(app, "127.0.0.1", 0) as proxy:
            yield proxy


@asynccontextmanager
async def client_of(url, route, *samplings):
    async with AsyncExitStack() as stack:
        if route == "completions":
            url = await stack.enter_async_context(without_generate(url))
        client = EngineClient(
            [url], request_timeout_s=300, max_attempts=1, unavailable_timeout_s=120, sampling_options=samplings
        )
        await stack.enter_async_context(client)
        with capture_logs() as lines:
            await client.wait_until_ready()
        result = next(line for line in lines if line["event"] == "engine.found")
        assert result["route"] == (GenerateApi if route == "generate" else CompletionsApi).path
        yield client


async def post(url, path, **body):
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()


async def metric(url, name):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    return sum(float(number) for number in re.findall(rf"^vllm:{name} (\S+)$", text, re.MULTILINE))


async def until(url, name, reached):
    with anyio.fail_after(300):
        while not reached(await metric(url, name)):
            await anyio.sleep(0.02)


async def cancel_in_the_middle(url, client):
    """Cancel callers of `sample` and assert that the engine aborts their requests."""
    before = await metric(url, GENERATED)
    async with anyio.create_task_group() as tasks:
        for i in range(8):  # enough that a busy server is far from done when it notices the cancellation
            tasks.start_soon(lambda i=i: client.sample([9 + i], LONG, min_policy_version=-1))
        await until(url, GENERATED, lambda n: n > before)
        tasks.cancel_scope.cancel()
    await until(url, RUNNING, lambda n: n == 0)
    await anyio.sleep(0.5)
    assert await metric(url, GENERATED) < before + 8 * LONG.max_tokens


def one_row(model, prompt, sampled, temperature):
    """Return the trainer's log-probs of the sampled tokens."""
    tokens = torch.tensor([[*prompt, *sampled.token_ids]])
    chosen = torch.arange(tokens.shape[1])[None] >= len(prompt)
    with torch.no_grad():
        return token_logprobs(LogprobModel.from_whole(model), tokens, chosen, temperature=temperature).logprobs_N


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("route", ROUTES)
async def test_the_trainers_ratio_to_the_engine_is_1_on_unchanged_weights(url, model, measured, route, temperature):
    sampling = SamplingOptions(temperature=temperature, max_tokens=24)
    result = {}
    async with client_of(url, route, sampling) as client, anyio.create_task_group() as tasks:

        async def ask(i):
            result[i] = await client.sample(PROMPTS[i], sampling, min_policy_version=-1)

        for i in range(len(PROMPTS)):
            tasks.start_soon(ask, i)
    furthest, tokens = 0.0, set()
    for i, sampled in result.items():
        ratios = (one_row(model, PROMPTS[i], sampled, temperature) - torch.tensor(sampled.logprobs)).exp()
        furthest = max(furthest, (ratios - 1).abs().max().item())
        tokens.update(sampled.token_ids)
    measured(f"the ratio is 1 within {furthest:.1e}")
    assert furthest < CLOSE
    assert len(tokens) > 5 * len(PROMPTS) ** 0.5, "of generation_config.json's top-k of 5 nothing is left"


@pytest.mark.parametrize(
    "restriction", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0.0}], ids=lambda r: next(iter(r))
)
@pytest.mark.parametrize("route", ROUTES)
async def test_a_restriction_to_one_token_is_greedy(url, model, route, restriction):
    sampling = SamplingOptions(**{"temperature": 1.0, "max_tokens": 8, "seed": 1} | restriction)
    async with client_of(url, route, sampling) as client:
        sampled = await client.sample(PROMPTS[0], sampling, min_policy_version=-1)
    tokens = torch.tensor([[*PROMPTS[0], *sampled.token_ids]])
    with torch.no_grad():
        likeliest = model(tokens).logits[0, len(PROMPTS[0]) - 1 : -1].argmax(-1)
    assert sampled.token_ids == likeliest.tolist()
    if "temperature" not in restriction:
        assert sampled.logprobs == pytest.approx([0.0] * 8, abs=1e-6), "of one token that was left"


@pytest.mark.parametrize("route", ROUTES)
async def test_a_bias_forces_a_token_and_a_stop_string_ends_the_turn_with_it(url, tokenizer, route):
    token = tokenizer.convert_tokens_to_ids("a")
    forced = SamplingOptions(temperature=1.0, max_tokens=6, logit_bias={token: 100.0})
    stopped = SamplingOptions(temperature=1.0, max_tokens=6, logit_bias={token: 100.0}, stop=("nowhere", "aaa"))
    late = SamplingOptions(temperature=1.0, max_tokens=6, logit_bias={token: 100.0}, stop=("aa",), min_tokens=4)
    async with client_of(url, route, forced, stopped) as client:
        turns = [
            await client.sample(PROMPTS[0], sampling, min_policy_version=-1) for sampling in (forced, stopped, late)
        ]
    assert [(turn.token_ids, turn.finish_reason) for turn in turns] == [
        ([token] * 6, "length"),
        ([token] * 3, "stop"),
        ([token] * 5, "stop"),
    ]
    assert turns[0].logprobs == pytest.approx([0.0] * 6, abs=1e-6)


@pytest.mark.parametrize("route", ROUTES)
async def test_no_stop_token_comes_before_min_tokens_and_the_last_token_is_sampled(url, tokenizer, route):
    end, other = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")
    bias = {end: 100.0, other: 50.0}
    sampling = SamplingOptions(temperature=1.0, max_tokens=9, min_tokens=5, logit_bias=bias)
    stopped = SamplingOptions(
        temperature=1.0, max_tokens=9, min_tokens=2, logit_bias={other: 100.0}, stop_token_ids=(other,)
    )
    async with client_of(url, route, sampling) as client:
        sampled = await client.sample(PROMPTS[0], sampling, min_policy_version=-1)
        own = await client.sample(PROMPTS[0], stopped, min_policy_version=-1)
    assert (sampled.token_ids, sampled.finish_reason) == ([other] * 5 + [end], "stop")
    assert (own.token_ids.index(other), len(own.token_ids), own.finish_reason) == (2, 3, "stop")


@pytest.mark.parametrize("route", ROUTES)
async def test_equal_seeds_give_equal_samples_and_other_seeds_others(url, route):
    def seeded(seed):
        return SamplingOptions(temperature=1.0, max_tokens=20, seed=seed)

    async with client_of(url, route) as client:
        turns = [
            await client.sample(PROMPTS[1], seeded(seed), min_policy_version=-1) for seed in (2**63 - 1, 2**63 - 1, 7)
        ]
    assert turns[0].token_ids == turns[1].token_ids
    assert turns[0].logprobs == pytest.approx(turns[1].logprobs, abs=CLOSE)
    assert turns[0].token_ids != turns[2].token_ids


@pytest.mark.parametrize("route", ROUTES)
async def test_a_prompt_that_is_too_long_is_refused_and_a_turn_that_fills_the_context_is_cut(url, route):
    sampling = SamplingOptions(temperature=1.0, max_tokens=50)
    endless = SamplingOptions(temperature=1.0, max_tokens=50, min_tokens=50)
    async with client_of(url, route, sampling) as client:
        with pytest.raises(EngineRefusedError, match=rf"maximum (context|model) length (of|is) {LENGTH}") as refused:
            await client.sample([9] * (LENGTH + 1), sampling, min_policy_version=-1)
        with pytest.raises(EngineRefusedError):
            await client.sample([9] * LENGTH, sampling, min_policy_version=-1)
        full = await client.sample([9] * (LENGTH - 6), endless, min_policy_version=-1)
    assert end_after_error(refused.value, 1) is TruncationReason.CONTEXT
    failure = end_after_error(refused.value, 0)
    assert isinstance(failure, Failure)
    assert failure.reason is RolloutReason.PROMPT_TOO_LONG
    assert (len(full.token_ids), full.finish_reason) == (6, "length")


async def test_a_cancelled_request_ends_at_the_engine(url):
    async with client_of(url, "generate") as client:
        await cancel_in_the_middle(url, client)


async def test_samples_with_a_runs_seeds_follow_the_softmax(url, model):
    """The log-prob tests judge each sample, this one their frequency: Pearson's statistic is within 5 deviations."""
    prompt, drawn = PROMPTS[3], []
    async with client_of(url, "generate") as client:

        async def draw(episodes):
            for episode in episodes:
                sampling = SamplingOptions(
                    temperature=1.0, max_tokens=1, seed=turn_seed(77 + episode // 4, episode % 4)
                )
                drawn.append((await client.sample(prompt, sampling, min_policy_version=-1)).token_ids[0])

        async with anyio.create_task_group() as tasks:
            for start in range(64):
                tasks.start_soon(draw, range(start, 3000, 64))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1) * 3000
    counts = torch.bincount(torch.tensor(drawn), minlength=len(expected)).double()
    often = expected >= 8
    assert often.sum() > 10
    expected = torch.cat([expected[often], expected[~often].sum().unsqueeze(0)])
    counts = torch.cat([counts[often], counts[~often].sum().unsqueeze(0)])
    freedom = len(expected) - 1
    assert float(((counts - expected) ** 2 / expected).sum()) < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("route", ROUTES)
async def test_an_aborted_request_is_never_a_sample(url, route):
    errors = []
    async with client_of(url, route) as client, anyio.create_task_group() as tasks:

        async def ask():
            with pytest.raises(EngineError, match=r"aborted the request after \d+ tokens") as error:
                await client.sample([9], LONG, min_policy_version=-1)
            errors.append(error.value)

        before = await metric(url, GENERATED)  # the reported number of running requests may be out of date
        tasks.start_soon(ask)
        await until(url, GENERATED, lambda n: n > before)
        await post(url, "/pause?mode=abort")
        await post(url, "/resume")
    assert not isinstance(errors[0], EngineRefusedError)


async def test_versions_are_exact_over_generate_and_the_older_one_over_completions(tied):
    first = await tied.push(0)
    sampling, result = SamplingOptions(temperature=1.0, max_tokens=MANY, min_tokens=MANY), {}
    async with (
        client_of(tied.url, "generate") as exact,
        client_of(tied.url, "completions") as bound,
        anyio.create_task_group() as tasks,
    ):
        before = await metric(tied.url, GENERATED)

        async def ask(name, client):
            result[name] = await client.sample([9], sampling, min_policy_version=first)

        tasks.start_soon(ask, "generate", exact)
        tasks.start_soon(ask, "completions", bound)
        await until(tied.url, GENERATED, lambda n: n > before + 40)
        second = await tied.name()
    switch = result["generate"].spans[0].end
    assert 0 < switch < MANY
    assert result["generate"].spans == [Span(first, 0, switch), Span(second, switch, MANY)]
    assert result["completions"].spans == [Span(first, 0, MANY)]
