"""The trainer's step on a GPU, against float32 on the CPU. Run by `make test-gpu`; skipped where there is none."""

import pytest
import torch
import transformers
from torch.nn.functional import cosine_similarity

from stream.records import Completion, Group, Prompt, Row, Span
from stream.validity import Measured
from workers.settings import TrainSettings
from workers.settings.toml_file import parse_settings
from workers.train.model.attention import set_attention
from workers.train.model.lm_head import find_lm_head
from workers.train.model.logit_blocks import LogitTransform, chunked_logprobs
from workers.train.model.logprobs import LogprobModel, token_logprobs
from workers.train.model.trainable_model import checkpoint_layers
from workers.train.step.batch import collate
from workers.train.step.learner import Learner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU (torch.cuda.is_available() is False)"),
]

VOCABULARY = 1000
CONFIG = transformers.Qwen2Config(
    vocab_size=VOCABULARY,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    tie_word_embeddings=True,
)
"""Heads of 64, which every kernel of flash attention has."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(5)
        transformers.AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return folder


def ids(generator, count):
    return torch.randint(1, VOCABULARY, (count,), generator=generator, dtype=torch.int32)


@pytest.fixture(scope="module")
def batch():
    """Two groups of four completions, 40 to 200 tokens each, with log-probs close to an untrained model's."""
    generator, groups = torch.Generator().manual_seed(1), []
    for name in ("p", "q"):
        completions = []
        for index in range(4):
            count = 40 + int(torch.randint(160, (), generator=generator))
            row = Row(
                prompt_ids=ids(generator, 30).numpy().tobytes(),
                token_ids=ids(generator, count).numpy().tobytes(),
                sampled_ranges=[(0, count // 2), (count // 2 + 5, count)],
                logprobs=torch.full((count - 5,), -6.9).numpy().tobytes(),
                spans=[Span(3, 0, count // 2), Span(3, count // 2 + 5, count)],
            )
            completions.append(Completion(index=index, rows=[row], reward=Measured(float(index % 2)), turns=2))
        groups.append(Group(prompt=Prompt(id=name, messages=[], group_size=4), completions=completions))
    return collate(groups)


def learner(base, device, dtype, **train):
    least = {
        "model": {"path": str(base), "dtype": dtype},
        "data": {"path": "none"},
        "environments": {"a": "calculator"},
    }
    train = {"learning_rate": 1e-4, "max_grad_norm": 1e9, "micro_batch_tokens": 600} | train
    return Learner(parse_settings(least | {"train": train}), device=device)


WAYS = {
    "packed, torch's flash attention": {"packing": "on", "attention": "varlen"},
    "packed, as it chooses": {"packing": "auto"},
    "padded, SDPA": {"packing": "off", "attention": "sdpa"},
    "packed, computed again": {"packing": "on", "attention": "varlen", "gradient_checkpointing": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_bfloat16_step_is_close_to_the_float32_step_on_the_cpu(base, batch, way):
    exact, result = learner(base, "cpu", "float32"), learner(base, "cuda", "bfloat16", **WAYS[way])
    assert result.runner.policy.packed == (not way.startswith("padded"))
    one, other = exact.step(batch, 3), result.step(batch, 3)
    assert other.trained
    for name, near in (("grad_norm", 0.05), ("entropy", 0.01)):
        assert other.metrics[name] == pytest.approx(one.metrics[name], rel=near)
    assert {p.dtype for p in result.parameters.values()} == {torch.float32}


def gradients(model, device, packing, attention, dtype):
    """Of the log-probs of three rows' tokens; rows packed or not."""
    model = model.to(device).eval()
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([150, 64, 97])
    tokens = torch.randint(1, VOCABULARY, (3, 150), generator=generator)
    chosen = torch.arange(150) < lengths[:, None]
    chosen[:, 0] = False
    parts = [part.to(device) for part in (tokens, chosen)]
    train = TrainSettings(packing=packing, attention=attention)
    chosen_way = set_attention(LogprobModel(model, find_lm_head(model)), train, dtype)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        result = token_logprobs(chosen_way, *parts, temperature=0.7, lengths_M=lengths.to(device))
    model.zero_grad()
    result.logprobs_N.square().sum().backward()
    return result.logprobs_N.detach().cpu(), {n: p.grad.cpu().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("packing", "attention"), [("on", "varlen"), ("off", "sdpa"), ("on", "sdpa")])
def test_bfloat16_gradients_point_in_the_direction_of_float32_gradients(base, packing, attention):
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    logprobs, expected = gradients(model, "cpu", "off", "sdpa", torch.float32)
    found_logprobs, result = gradients(model, "cuda", packing, attention, torch.bfloat16)
    assert (found_logprobs - logprobs).abs().max() < 0.1
    for name, gradient in expected.items():
        assert cosine_similarity(result[name].flatten(), gradient.flatten(), dim=0) > 0.98, name


def test_log_probs_on_the_gpu_equal_those_on_the_cpu():
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(300, 64, generator=generator), torch.randn(5000, 64, generator=generator) / 8
    targets = torch.randint(5000, (300,), generator=generator)
    expected = chunked_logprobs(hidden.double(), weight.double(), None, targets, LogitTransform(), entropy="value")
    moved = [tensor.cuda() for tensor in (hidden, weight)]
    result = chunked_logprobs(*moved, None, targets.cuda(), LogitTransform(), entropy="value", block=2**16)
    assert torch.allclose(result.logprobs_N.cpu().double(), expected.logprobs_N, atol=1e-4)
    assert torch.allclose(result.entropy_N.cpu().double(), expected.entropy_N, atol=1e-4)
    rounded = [tensor.bfloat16().double() for tensor in (hidden, weight)]
    expected = chunked_logprobs(*rounded, None, targets, LogitTransform())
    with torch.autocast("cuda", torch.bfloat16):
        result = chunked_logprobs(*moved, None, targets.cuda(), LogitTransform(), block=2**16)
    assert result.logprobs_N.dtype == torch.float32
    assert torch.allclose(result.logprobs_N.cpu().double(), expected.logprobs_N, atol=1e-4)


def peak_of(work):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_chunked_loss_takes_less_than_a_quarter_of_the_usual_memory():
    """4k tokens of a vocabulary of 150k: 2.5 GB of float32 logits, and three times that in the usual way."""
    if torch.cuda.mem_get_info()[0] < 10e9:
        pytest.skip("less than 10 GB of the GPU's memory are free")
    hidden = torch.randn(4096, 64, device="cuda", requires_grad=True)
    weight = torch.randn(150_000, 64, device="cuda", requires_grad=True)
    targets = torch.randint(150_000, (4096,), device="cuda")

    def usual():
        torch.nn.functional.cross_entropy(hidden @ weight.T, targets).backward()

    def blockwise():
        chunked_logprobs(hidden, weight, None, targets, LogitTransform()).logprobs_N.mean().backward()

    for work in (usual, blockwise):  # what libraries set up once
        work()
    assert peak_of(blockwise) < peak_of(usual) / 4


def test_gradient_checkpointing_takes_less_memory(base):
    def peak(again):
        model = transformers.AutoModelForCausalLM.from_pretrained(base).cuda().eval()
        if again:
            checkpoint_layers(model)
        tokens = torch.randint(1, VOCABULARY, (16, 512), device="cuda")
        way = LogprobModel(model, find_lm_head(model))

        def work():
            with torch.autocast("cuda", torch.bfloat16):
                result = token_logprobs(
                    way, tokens, (tokens > 0) & (torch.arange(512, device="cuda") > 500), temperature=1
                )
            result.logprobs_N.sum().backward()

        work()
        return peak_of(work)

    assert peak(again=True) < peak(again=False) / 2
