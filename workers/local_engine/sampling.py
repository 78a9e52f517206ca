"""Sample one token per row, with its log-prob under the distribution that it was sampled from."""

from collections.abc import Collection, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from workers.engine_api.wire import UNKNOWN_LOGPROB, SamplingParams, TokenLogprob


class Sample(NamedTuple):
    """One token per row."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token; not finite if the logits are not."""
    top_logprobs: list[list[TokenLogprob]]
    """The most probable tokens of each row, in descending order; their number is a sampling parameter of the row."""


def sample(
    logits_BV: Tensor,
    params: Sequence[SamplingParams],
    rngs: Sequence[Random],
    banned_tokens: Sequence[Collection[int]] = (),
) -> Sample:
    """Sample one token per row.

    Each row draws one number from its own generator, so that a request with a seed samples the same tokens in any
    batch; the sampled token is where the cumulative distribution exceeds that number.

    Args:
        logits_BV: float32 logits.
        params: sampling parameters of each row.
        rngs: random generator of each row.
        banned_tokens: tokens that each row may not sample; empty: none in any row.

    Returns:
        Tokens and their log-probs. The distribution is the softmax of (logits + bias) / temperature without banned
        tokens, truncated by min-p, top-k and top-p, and renormalized. Temperature 0 returns the most probable token
        with its log-prob at temperature 1.
    """
    if any(banned_tokens) or any(p.logit_bias for p in params):
        logits_BV = logits_BV.clone()
    for row, p in enumerate(params):
        if p.logit_bias:
            logits_BV[row, list(p.logit_bias)] += torch.tensor(list(p.logit_bias.values()))
        if banned_tokens and banned_tokens[row]:
            logits_BV[row, list(banned_tokens[row])] = float("-inf")
    temperatures = torch.tensor([p.temperature or 1.0 for p in params])[:, None]
    logprobs_BV = torch.log_softmax(logits_BV / temperatures, dim=-1)
    for row, p in enumerate(params):
        if p.truncates and p.temperature:
            logprobs_BV[row] = truncate(logprobs_BV[row], p)
    cumulated_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulated_BV[:, -1:]
    draws = torch.tensor([r.random() for r in rngs], dtype=torch.float64)[:, None] * total
    draws = torch.minimum(draws, torch.nextafter(total, torch.zeros_like(total)))  # the product may round up to `total`
    ids = torch.searchsorted(cumulated_BV, draws, right=True).clamp_(max=logits_BV.shape[1] - 1)
    greedy = [p.temperature == 0 for p in params]
    if any(greedy):
        ids = torch.where(torch.tensor(greedy)[:, None], logits_BV.argmax(dim=-1, keepdim=True), ids)
    top_logprobs = [_top_logprobs(logprobs_BV[row], p.logprobs or 0) for row, p in enumerate(params)]
    return Sample(ids.squeeze(1).tolist(), logprobs_BV.gather(1, ids).squeeze(1).tolist(), top_logprobs)


def _top_logprobs(logprobs_V: Tensor, count: int) -> list[TokenLogprob]:
    if not count:
        return []
    values, ids = logprobs_V.topk(min(count, len(logprobs_V)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprob(max(value, UNKNOWN_LOGPROB), token) for token, value in pairs]


def truncate(logprobs_V: Tensor, params: SamplingParams) -> Tensor:
    """Apply min-p, then top-k, then top-p, in the same order as vLLM, and renormalize.

    Top-p keeps the smallest set of most probable tokens whose total probability reaches p: a token is kept if the
    probability of all more probable ones is less than p.
    """
    if params.min_p > 0:
        floor = logprobs_V.max() + torch.tensor(params.min_p).log()
        logprobs_V = logprobs_V.masked_fill(logprobs_V < floor, float("-inf"))
    if 0 < params.top_k < len(logprobs_V):
        least = logprobs_V.topk(params.top_k).values[-1]
        logprobs_V = logprobs_V.masked_fill(logprobs_V < least, float("-inf"))
    if params.top_p < 1:
        ordered, order = torch.log_softmax(logprobs_V, dim=-1).sort(descending=True)
        mass = ordered.exp()
        cut = mass.cumsum(dim=-1) - mass >= params.top_p
        cut[0] = False
        logprobs_V = logprobs_V.masked_fill(torch.zeros_like(cut).scatter(0, order, cut), float("-inf"))
    return torch.log_softmax(logprobs_V, dim=-1)
