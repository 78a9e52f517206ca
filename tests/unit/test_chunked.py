"""Log-probs computed block by block, against logits computed at once, and their memory use."""

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workers.train.model.logit_blocks import MIN_LOGPROB, LogitTransform, chunked_logprobs

pytestmark = pytest.mark.models

TOKENS, HIDDEN, WORDS = 13, 8, 29
FEW = (5, 3, 7)
"""Sizes for a derivative of every output by every input."""
FINISHES = [
    LogitTransform(),
    LogitTransform(scale=0.25, temperature=0.7),
    LogitTransform(scale=1.7, softcap=3.0, temperature=1.3),
]
BLOCKS = [5, 50, 10**6]
"""Less than a column, part of the vocabulary, everything."""


def made(dtype, *, bias=True, requires_grad=True, sizes=(TOKENS, HIDDEN, WORDS)):
    tokens, width, words = sizes
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parts = [draw(tokens, width), 2 * draw(words, width), draw(words)]
    hidden, weight, offsets = (part.to(dtype).requires_grad_(requires_grad) for part in parts)
    targets = torch.randint(words, (tokens,), generator=generator)
    return hidden, weight, offsets if bias else None, targets


def naive(hidden, weight, bias, targets, finish):
    logits = torch.nn.functional.linear(hidden, weight, bias) * finish.scale
    if finish.softcap:
        logits = finish.softcap * torch.tanh(logits / finish.softcap)
    logprobs = (logits / finish.temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.clamp(min=MIN_LOGPROB)).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy, (2 * logprobs).exp().sum(-1)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_values_and_gradients_equal_those_of_full_logits(dtype, near, finish, block):
    inputs = made(dtype)
    weights = torch.linspace(-1, 1, TOKENS, dtype=dtype), torch.linspace(2, -1, TOKENS, dtype=dtype)
    expected = naive(*inputs, finish)
    result = chunked_logprobs(*inputs, finish, entropy="gradient", sum_pi_squared=True, block=block)
    for one, other in zip(result, expected, strict=True):
        assert torch.allclose(one, other, rtol=near, atol=near)
    gradients = [
        torch.autograd.grad(logprobs @ weights[0] + entropy @ weights[1], inputs[:3])
        for logprobs, entropy, _ in (result, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=10 * near, atol=10 * near * float(other.abs().max()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("finish", FINISHES)
def test_gradients_equal_finite_differences(finish, bias):
    hidden, weight, offsets, targets = made(torch.float64, bias=bias, sizes=FEW)

    def both(*inputs):
        return tuple(
            chunked_logprobs(*inputs[:2], inputs[2] if bias else None, targets, finish, entropy="gradient", block=10)
        )[:2]

    assert torch.autograd.gradcheck(both, (hidden, weight, *([offsets] if bias else [])))


def test_only_requested_results_have_a_gradient():
    hidden, weight, bias, targets = made(torch.float64)
    weight.requires_grad_(False)  # a frozen output layer, as under LoRA
    result = chunked_logprobs(hidden, weight, bias, targets, LogitTransform(), entropy="value", sum_pi_squared=True)
    assert result.logprobs_N.requires_grad
    assert not result.entropy_N.requires_grad
    assert not result.sum_pi_squared_N.requires_grad
    result.logprobs_N.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert bias.grad is not None
    with torch.no_grad():
        assert not chunked_logprobs(hidden, weight, bias, targets, LogitTransform()).logprobs_N.requires_grad


def test_a_token_with_probability_0_gives_no_nan():
    hidden, weight, bias, _ = made(torch.float64)
    targets = torch.arange(TOKENS)
    barred = bias.detach().clone()
    barred[-5:] = -math.inf
    barred.requires_grad_()
    expected = naive(hidden, weight, barred, targets, LogitTransform())
    result = chunked_logprobs(
        hidden, weight, barred, targets, LogitTransform(), entropy="gradient", sum_pi_squared=True, block=40
    )
    for one, other in zip(result, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)
    (result.logprobs_N.sum() + result.entropy_N.sum()).backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in (hidden, weight, barred))


def test_a_nan_weight_gives_nan_log_probs():
    hidden, weight, bias, targets = made(torch.float32, requires_grad=False)
    weight[7, 0] = math.nan
    assert torch.isnan(chunked_logprobs(hidden, weight, bias, targets, LogitTransform(), block=40).logprobs_N).all()


def test_no_targets_are_no_error():
    hidden, weight, bias, targets = made(torch.float32)
    result = chunked_logprobs(
        hidden[:0], weight, bias, targets[:0], LogitTransform(), entropy="gradient", sum_pi_squared=True
    )
    assert [len(part) for part in result] == [0, 0, 0]
    result.logprobs_N.sum().backward()
    assert not weight.grad.any()


def test_under_autocast_inputs_are_rounded_and_logits_are_not():
    """Logits of rounded inputs stay in float32: rounding them as well would exceed the tolerance."""
    hidden, weight, bias, targets = made(torch.float32)
    rounded = [tensor.detach().bfloat16().float() for tensor in (hidden, weight)]
    expected = naive(*rounded, bias, targets, LogitTransform())[0]
    with torch.autocast("cpu", torch.bfloat16):
        result = chunked_logprobs(hidden, weight, bias, targets, LogitTransform(), block=40).logprobs_N
    assert result.dtype == torch.float32
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-5)
    result.sum().backward()
    exact = torch.autograd.grad(naive(hidden, weight, bias, targets, LogitTransform())[0].sum(), (hidden, weight))
    for tensor, gradient in zip((hidden, weight), exact, strict=True):
        assert tensor.grad.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(tensor.grad.flatten(), gradient.flatten(), dim=0) > 0.999


class Peak(TorchDispatchMode):
    """Records the peak number of bytes in live tensors that were created while it is active."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return made

    def count(self, storage):
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        self.live += storage.nbytes()
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self.forget, key, storage.nbytes())

    def forget(self, key, size):
        self.known.discard(key)
        self.live -= size


def peak_of(function, *inputs):
    with Peak() as peak:
        function(*inputs).sum().backward()
    return peak.most


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """Peak memory for 512 tokens, 8k words and blocks of 2^18 logits is below a quarter; twice the tokens add < 25%."""

    def inputs(tokens):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(tokens, 8, generator=generator, requires_grad=True)
        weight = torch.randn(8192, 8, generator=generator, requires_grad=True)
        return hidden, weight, None, torch.randint(8192, (tokens,), generator=generator), LogitTransform()

    def blockwise(*inputs):
        return chunked_logprobs(*inputs, block=2**18).logprobs_N

    def at_once(hidden, weight, _, targets, __):
        return torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")

    small, large = (peak_of(way, *inputs(512)) for way in (blockwise, at_once))
    assert large >= 2 * 512 * 8192 * 4  # logits and their gradient at least: the mode counts them
    assert small < large / 4
    assert peak_of(blockwise, *inputs(1024)) < 1.25 * small
