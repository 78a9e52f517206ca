"""From logits to one token for each row, and the log-prob of that token under the distribution sampled from."""

from collections.abc import Collection, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from workers.engine_api.wire import UNKNOWN_LOGPROB, SamplingParams, TokenLogprob


class Sample(NamedTuple):
    """One token for each row."""

    token_ids: list[int]
    logprobs: list[float]
    """Not finite where the logits were not."""
    top_logprobs: list[list[TokenLogprob]]
    """As many of the likeliest tokens as the row asks for, the likeliest first."""


def sample(
    logits_BV: Tensor,
    params: Sequence[SamplingParams],
    rngs: Sequence[Random],
    banned_tokens: Sequence[Collection[int]] = (),
) -> Sample:
    """Draw one token for each row.

    Each row consumes one number of its own generator, so a seeded request draws the same whoever is beside it; the
    token is where the cumulative distribution passes that number.

    Args:
        logits_BV: float32.
        params: how to sample each row.
        rngs: a generator for each row.
        banned_tokens: tokens that each row may not sample now; empty: none, in any row.

    Returns:
        Tokens, and log-probs: of (logits + bias) / temperature without what is banned, renormalised over what top-k,
        top-p and min-p leave; the same at temperature 1 where the temperature is 0.
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
    draws = torch.minimum(draws, torch.nextafter(total, torch.zeros_like(total)))  # a rounded product may reach it
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
    """Leave what min-p, then top-k, then top-p allow, as vLLM orders them, and renormalise.

    top-p keeps the smallest set of most probable tokens whose mass reaches p: a token stays where the mass before it
    is less than p.
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
