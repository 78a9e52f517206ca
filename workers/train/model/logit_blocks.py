"""Log-probs from hidden states and the output layer, by blocks of logits: some tokens by some of the vocabulary.

The logits of all tokens are the largest tensor of a training step: 8k tokens of a vocabulary of 150k are 4.9 GB in
float32, and a naive loss holds several copies. Here only one block exists at a time. The forward pass carries running
statistics (maximum, sum of exponentials, entropy terms) from block to block; the backward pass recomputes each block
and adds its share to the gradients. This costs one more product with the output layer, and memory no longer grows with
tokens times vocabulary.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

BLOCK: Final = 2**24
"""Number of logits in a block: 64 MiB in float32. Two or three such tensors exist at a time."""
BLOCK_TOKENS: Final = 4096
"""Maximum number of tokens in a block, so that its vocabulary range is long enough for an efficient product."""


class LogitTransform(NamedTuple):
    """How a product of hidden state and weight becomes a logit: ``cap(product * scale) / temperature``."""

    scale: float = 1.0
    softcap: float = 0.0
    """c in ``c * tanh(z / c)``; 0 for no cap."""
    temperature: float = 1.0


class LogitBlock(NamedTuple):
    """Token range and vocabulary range of one block."""

    tokens: slice
    vocab: slice
    weight_vH: Tensor
    """In the dtype of products."""


class LogitConfig(NamedTuple):
    """How logits are computed."""

    transform: LogitTransform
    dtype: torch.dtype
    """Data type of the inputs of matrix products."""
    block: int
    """Number of logits that exist at a time."""


class LogitInputs(NamedTuple):
    """Inputs of the logits of N tokens."""

    hidden_NH: Tensor
    """In the dtype of products."""
    weight_VH: Tensor
    bias_V: Tensor | None
    targets_N: Tensor
    config: LogitConfig

    def blocks(self) -> Iterator[LogitBlock]:
        """Yield all blocks; each vocabulary range of the weight is cast once."""
        count, vocab_size = len(self.hidden_NH), len(self.weight_VH)
        height = max(min(count, BLOCK_TOKENS, self.config.block), 1)
        width = max(self.config.block // height, 1)
        for start in range(0, vocab_size, width):
            vocab = slice(start, min(start + width, vocab_size))
            weight_vH = self.weight_VH[vocab].to(self.config.dtype)
            for token in range(0, count, height):
                yield LogitBlock(slice(token, token + height), vocab, weight_vH)

    def logits(self, block: LogitBlock) -> Tensor:
        """Return the block's logits after scale and cap, before the temperature."""
        transform = self.config.transform
        logits_nv = matmul_float32(self.hidden_NH[block.tokens], block.weight_vH.T)
        if self.bias_V is not None:
            logits_nv += self.bias_V[block.vocab].to(logits_nv.dtype)
        if transform.scale != 1.0:
            logits_nv *= transform.scale
        if transform.softcap:
            logits_nv.div_(transform.softcap).tanh_().mul_(transform.softcap)
        return logits_nv

    def apply_temperature(self, logits_nv: Tensor) -> Tensor:
        """Divide by the temperature, in place."""
        temperature = self.config.transform.temperature
        return logits_nv if temperature == 1.0 else logits_nv.div_(temperature)

    def targets(self, block: LogitBlock) -> tuple[Tensor, Tensor]:
        """Return whether each token's target is in the block (n, 1), and its column there (n, 1)."""
        columns_n1 = (self.targets_N[block.tokens] - block.vocab.start).unsqueeze(1)
        width = block.vocab.stop - block.vocab.start
        return (columns_n1 >= 0) & (columns_n1 < width), columns_n1.clamp(0, width - 1)


def matmul_float32(a_nk: Tensor, b_km: Tensor) -> Tensor:
    """Multiply matrices with sums in float32 or wider."""
    if a_nk.dtype not in {torch.bfloat16, torch.float16}:
        return a_nk @ b_km
    if a_nk.is_cuda:
        return torch.mm(a_nk, b_km, out_dtype=torch.float32)
    return a_nk.float() @ b_km.float()


MIN_LOGPROB: Final = -1e4
"""Replaces a log-prob of minus infinity before the product with its probability 0, which would be NaN."""

EntropyMode = Literal["", "value", "gradient"]
"""No entropies, entropies without gradient, or entropies with gradient."""


class ChunkedLogprobs(NamedTuple):
    """Results per token; float32, or float64 for float64 hidden states."""

    logprobs_N: Tensor
    entropy_N: Tensor
    """Nats; zeros unless requested."""
    sum_pi_squared_N: Tensor
    """Sum of squared probabilities, without gradient; zeros unless requested."""


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    transform: LogitTransform,
    *,
    entropy: EntropyMode = "",
    sum_pi_squared: bool = False,
    block: int = BLOCK,
) -> ChunkedLogprobs:
    """Compute log-probs of the targets, with gradients for hidden states, weight and bias.

    Under autocast the inputs of products are rounded to its dtype, as everywhere in the model; sums and results are
    float32.

    Args:
        hidden_NH: last hidden states.
        weight_VH: weight of the output layer.
        bias_V: bias of the output layer, or None.
        targets_N: int64, target token ids.
        transform: turns products of hidden states and weight into logits.
        entropy: whether to compute entropies, without or with gradient.
        sum_pi_squared: whether to compute sums of squared probabilities.
        block: largest number of logits in memory at a time.
    """
    device = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NH.dtype
    if hidden_NH.dtype == torch.float64:
        dtype = torch.float64
    config = LogitConfig(transform, dtype, block)
    outputs = _ChunkedLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, config, entropy, sum_pi_squared)  # type: ignore[no-untyped-call]
    return ChunkedLogprobs(*outputs)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        config: LogitConfig,
        entropy: EntropyMode,
        squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = LogitInputs(hidden_NH.to(config.dtype), weight_VH, bias_V, targets_N, config)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            top_N, total_N, chosen_N, moment_N, squared_N = _sums(inputs, entropy=bool(entropy), squares=squares)
        log_total_N = total_N.log()
        logprobs_N = chosen_N - top_N - log_total_N
        # H = log sum exp z - sum p z, with the maximum subtracted from z in both.
        entropy_N = log_total_N - moment_N / total_N if entropy else torch.zeros_like(logprobs_N)
        sum_pi_squared_N = squared_N / total_N.square() if squares else torch.zeros_like(logprobs_N)
        ctx.save_for_backward(inputs.hidden_NH, weight_VH, bias_V, targets_N, top_N, log_total_N, entropy_N)
        ctx.config, ctx.hidden_dtype = config, hidden_NH.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sum_pi_squared_N, *(() if entropy == "gradient" else (entropy_N,)))
        return logprobs_N, entropy_N, sum_pi_squared_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_logprob_N, by_entropy_N, _ = gradients
        hidden_NH, weight_VH, bias_V, targets_N, top_N, log_total_N, entropy_N = ctx.saved_tensors
        inputs = LogitInputs(hidden_NH, weight_VH, bias_V, targets_N, ctx.config)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        if by_logprob_N is None:
            by_logprob_N = torch.zeros_like(top_N)
        wide = top_N.dtype
        hidden_grad_NH = torch.zeros_like(hidden_NH, dtype=wide) if for_hidden else None
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=wide) if for_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and for_bias else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for block in inputs.blocks():
                rows = block.tokens
                grad_nv = _logits_grad(
                    *(inputs, block, top_N[rows], log_total_N[rows], by_logprob_N[rows]),
                    None if by_entropy_N is None else by_entropy_N[rows],
                    entropy_N[rows],
                )
                if bias_grad_V is not None:
                    bias_grad_V[block.vocab] += grad_nv.sum(dim=0)
                grad_nv = grad_nv.to(inputs.config.dtype)
                if hidden_grad_NH is not None:
                    hidden_grad_NH[rows] += matmul_float32(grad_nv, block.weight_vH)
                if weight_grad_VH is not None:
                    weight_grad_VH[block.vocab] += matmul_float32(grad_nv.T, hidden_NH[rows])
        raw = (hidden_grad_NH, weight_grad_VH, bias_grad_V)
        dtypes = (ctx.hidden_dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype)
        cast = (None if grad is None else grad.to(dtype) for grad, dtype in zip(raw, dtypes, strict=True))
        return (*cast, None, None, None, None)


def _sums(inputs: LogitInputs, *, entropy: bool, squares: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Accumulate statistics over the vocabulary for each token.

    Returns:
        The maximum logit m, the sum of e^(z - m), the target's logit, and if requested the sums of e^(z - m) (z - m)
        and of e^2(z - m).
    """
    wide = torch.float64 if inputs.config.dtype == torch.float64 else torch.float32
    zeros_N = torch.zeros(len(inputs.hidden_NH), dtype=wide, device=inputs.hidden_NH.device)
    # Not minus infinity, because differences with it are NaN.
    top_N = torch.full_like(zeros_N, torch.finfo(wide).min)
    total_N, chosen_N, moment_N, squared_N = zeros_N, zeros_N.clone(), zeros_N.clone(), zeros_N.clone()
    for block in inputs.blocks():
        rows = block.tokens
        logits_nv = inputs.apply_temperature(inputs.logits(block))
        inside_n1, columns_n1 = inputs.targets(block)
        chosen_N[rows] = torch.where(inside_n1, logits_nv.gather(1, columns_n1), chosen_N[rows, None]).squeeze(1)
        top_n = torch.maximum(top_N[rows], logits_nv.amax(dim=1))
        fallen_n = top_N[rows] - top_n
        shrunk_n = fallen_n.exp()
        logits_nv -= top_n.unsqueeze(1)
        powers_nv = logits_nv.exp()
        if entropy:
            moment_n = (powers_nv * logits_nv.clamp_(min=MIN_LOGPROB)).sum(dim=1)
            before_n = moment_N[rows] + fallen_n.clamp(min=MIN_LOGPROB) * total_N[rows]
            moment_N[rows] = shrunk_n * before_n + moment_n
        if squares:
            squared_N[rows] = shrunk_n.square() * squared_N[rows] + powers_nv.square().sum(dim=1)
        total_N[rows] = shrunk_n * total_N[rows] + powers_nv.sum(dim=1)
        top_N[rows] = top_n
    return top_N, total_N, chosen_N, moment_N, squared_N


def _logits_grad(
    inputs: LogitInputs,
    block: LogitBlock,
    top_n: Tensor,
    log_total_n: Tensor,
    by_logprob_n: Tensor,
    by_entropy_n: Tensor | None,
    entropy_n: Tensor,
) -> Tensor:
    """Return the gradient of the loss with respect to each product of hidden state and weight in the block.

    With log-prob l of a token id and p = e^l, the target's log-prob contributes (1 if it is the target else 0) - p, and
    the entropy H contributes -p (l + H).
    """
    logits_nv = inputs.logits(block)
    scale, softcap, temperature = inputs.config.transform
    # d tanh(x) = 1 - tanh(x)^2
    slope_nv = 1 - (logits_nv / softcap).square() if softcap else None
    logprobs_nv = inputs.apply_temperature(logits_nv).sub_(top_n.unsqueeze(1)).sub_(log_total_n.unsqueeze(1))
    if by_entropy_n is None:
        grad_nv = logprobs_nv.exp_().mul_(-by_logprob_n.unsqueeze(1))
    else:
        powers_nv = logprobs_nv.exp()
        grad_nv = logprobs_nv.clamp_(min=MIN_LOGPROB).add_(entropy_n.unsqueeze(1)).mul_(by_entropy_n.unsqueeze(1))
        grad_nv = grad_nv.add_(by_logprob_n.unsqueeze(1)).neg_().mul_(powers_nv)
    inside_n1, columns_n1 = inputs.targets(block)
    grad_nv.scatter_add_(1, columns_n1, torch.where(inside_n1, by_logprob_n.unsqueeze(1), 0.0))
    if slope_nv is not None:
        grad_nv *= slope_nv
    return grad_nv if scale == temperature else grad_nv.mul_(scale / temperature)
