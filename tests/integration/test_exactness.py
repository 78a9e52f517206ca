"""The stored ids, log-probs and versions of an episode match a forward pass of the right weights."""

import math
import shutil
from pathlib import Path

import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM

from envs.factory import EnvironmentFactory
from stream.records import Prompt
from stream.validity import Measured
from tests.base_models.warm_start import warm_start
from workers.demo.base_models import write_base_model
from workers.demo.task import training_rows
from workers.engine_api.discovery import EngineDiscovery
from workers.local_engine.local_server import EngineLimits, serve_local_engine
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import AlgorithmSettings, DataSettings, ModelSettings, RewardSettings, RolloutSettings, Settings
from workers.train.publishing.publisher import WeightPublisher
from workers.train.publishing.transport import PausedUpdate, SharedFolderTransfer
from workers.train.step.batch import collate
from workers.train.step.group_checks import mask_batch

pytestmark = [pytest.mark.models, pytest.mark.timeout(120)]

LIMITS = RolloutSettings(group_size=4, max_turns=4, max_tokens_per_turn=40, max_tokens=220)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[int, Path]:
    """Two policies that use tools: version 0, and version 1 after a few training steps."""
    folder = tmp_path_factory.mktemp("policies")
    write_base_model("calculator", folder / "v0")
    shutil.copytree(folder / "v0", folder / "v1")
    warm_start(folder / "v1", 4, steps=4, threads=1)
    return {0: folder / "v0", 1: folder / "v1"}


def forward(model, row) -> list[float]:
    """Return log-probs of the row's sampled tokens, teacher-forced."""
    ids = torch.tensor([[*row.prompt, *row.tokens]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
    places = [len(row.prompt) + i for start, end in row.sampled_ranges for i in range(start, end)]
    return [logprobs[place - 1, ids[0, place]].item() for place in places]


def versions(row) -> list[int]:
    """Return the policy version of each sampled token."""
    of = {i: span.version for span in row.spans for i in range(span.start, span.end)}
    return [of[i] for start, end in row.sampled_ranges for i in range(start, end)]


class Watched:
    """An engine client that sets an event after `turns` sampled turns."""

    def __init__(self, engine, turns) -> None:
        self.engine = engine
        self.left = turns
        self.reached = anyio.Event()

    async def sample(self, *arguments, **options):
        sampled = await self.engine.sample(*arguments, **options)
        self.left -= 1
        if self.left == 0:
            self.reached.set()
        return sampled


async def roll_out_all(policies, prompts, push_after=None):
    """Play all prompts at once on a real engine; push version 1 after `push_after` sampled turns."""
    urls, groups = [], []
    ready = anyio.Event()

    def announce(url):
        urls.append(url)
        ready.set()

    factories = {"calculator": await anyio.to_thread.run_sync(EnvironmentFactory.load, "calculator")}
    chat = await anyio.to_thread.run_sync(ChatTokenizer.load, policies[0], {}, None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            lambda: serve_local_engine(
                policies[0], port=0, limits=EngineLimits(16, 400), threads=1, dtype="float32", ready=announce
            )
        )
        with anyio.fail_after(60):
            await ready.wait()
            publisher = WeightPublisher(
                EngineDiscovery(urls), PausedUpdate(SharedFolderTransfer()), retry_timeout_s=20, update_timeout_s=20
            )
            await publisher.push(policies[0], 0)
            async with (
                EngineClient(urls, request_timeout_s=60, max_attempts=3, unavailable_timeout_s=20) as engine,
                EnvironmentPool(factories, size=4 * len(prompts)) as pool,
            ):
                sampler = Watched(engine, push_after or 0)

                async def play(prompt):
                    groups.append(
                        await GroupRunner(
                            chats={prompt.environment: ChatSetup(chat, TOOL_FORMATS["hermes"])},
                            sampler=sampler,
                            pool=pool,
                            limits=LIMITS,
                            factories=factories,
                        ).run(prompt)
                    )

                async with anyio.create_task_group() as playing:
                    for prompt in prompts:
                        playing.start_soon(play, prompt)
                    if push_after is not None:
                        await sampler.reached.wait()
                        await publisher.push(policies[1], 1)
                        assert await publisher.engine_versions() == {urls[0]: 1}
        tasks.cancel_scope.cancel()
    return groups


def prompts(n):
    return [
        Prompt(
            id=f"d:0:{i}",
            messages=row["prompt"],
            fields={"problem": row["problem"], "answer": row["answer"]},
            environment="calculator",
            group_size=4,
            seed=100 * i,
        )
        for i, row in enumerate(training_rows(n, 5))
    ]


def check_rows(groups, policies) -> set[int]:
    """Check every stored log-prob against its version's weights. Return the versions found."""
    models = {v: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for v, path in policies.items()}
    seen = set()
    for completion in (c for group in groups for c in group.completions):
        assert completion.failure is None
        for row in completion.rows:
            right = {v: forward(model, row) for v, model in models.items()}
            for i, (stored, version) in enumerate(zip(row.sampled_logprobs, versions(row), strict=True)):
                assert math.isclose(stored, right[version][i], abs_tol=TOLERANCE)
                seen.add(version)
    return seen


async def test_a_three_turn_completion_is_stored_to_the_token(policies):
    groups = await roll_out_all(policies, prompts(8))
    assert check_rows(groups, {0: policies[0]}) == {0}
    long = [c for g in groups for c in g.completions if c.turns >= 3 and c.truncated is None]
    assert long, "no episode came to three turns"
    chat = await anyio.to_thread.run_sync(ChatTokenizer.load, policies[0], {}, None)
    for completion in long:
        (row,) = completion.rows
        assert len(row.sampled_ranges) == completion.turns
        assert list(row.prompt) == chat.prompt_ids(completion.prompt_messages)
        # The text contains each turn as sampled and each tool's answer as the template writes it, and nothing else.
        text = chat.decode(list(row.tokens))
        for message in completion.messages:
            if message["role"] == "tool":
                assert str(message["content"]) in text


async def test_sampled_tokens_and_only_they_bear_loss(policies):
    groups = await roll_out_all(policies, prompts(4))
    for group in groups:
        for i, completion in enumerate(group.completions):
            completion.reward = Measured(float(i))
    batch = collate(groups)
    settings = Settings(
        model=ModelSettings(path="m"),
        data=DataSettings(path="d"),
        rewards=(RewardSettings(ref="x"),),
        algorithm=AlgorithmSettings(),
    )
    masks = mask_batch(batch, settings, version=0)
    rows = [row for group in groups for completion in group.completions for row in completion.rows]
    for r, row in enumerate(rows):
        bearing = {i - len(row.prompt) for i in torch.nonzero(masks.loss_tokens_RT[r]).flatten().tolist()}
        assert bearing == {i for start, end in row.sampled_ranges for i in range(start, end)}


async def test_weights_pushed_in_flight_take_effect_at_the_token_that_the_spans_name(policies):
    groups = await roll_out_all(policies, prompts(24), push_after=20)
    assert check_rows(groups, policies) == {0, 1}
    mixed = [r for g in groups for c in g.completions for r in c.rows if len({s.version for s in r.spans}) == 2]
    assert mixed, "no completion was under way when the weights changed"
