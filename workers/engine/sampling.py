"""From logits to one token for each row, and the log-prob of that token under the distribution sampled from."""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from workers.engine.wire import SamplingParams


def sample(
    logits_BV: Tensor, params: Sequence[SamplingParams], randoms: Sequence[Random]
) -> tuple[list[int], list[float]]:
    """Draw one token for each row.

    Each row consumes one number of its own generator, so a seeded request draws the same whoever is beside it; the
    token is where the cumulative distribution passes that number.

    Args:
        logits_BV: float32.
        params: how to sample each row.
        randoms: a generator for each row.

    Returns:
        Token ids, and log-probs: of logits / temperature, renormalised over what top-k, top-p and min-p leave;
        of the raw logits where the temperature is 0. A log-prob that is not finite means that the logits were not.
    """
    temperatures = torch.tensor([p.temperature or 1.0 for p in params])[:, None]
    logprobs_BV = torch.log_softmax(logits_BV / temperatures, dim=-1)
    for row, p in enumerate(params):
        if p.restricted and p.temperature:
            logprobs_BV[row] = restrict(logprobs_BV[row], p)
    cumulated_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulated_BV[:, -1:]
    drawn = torch.tensor([r.random() for r in randoms], dtype=torch.float64)[:, None] * total
    drawn = torch.minimum(drawn, torch.nextafter(total, torch.zeros_like(total)))  # a rounded product may reach it
    ids = torch.searchsorted(cumulated_BV, drawn, right=True).clamp_(max=logits_BV.shape[1] - 1)
    greedy = [p.temperature == 0 for p in params]
    if any(greedy):
        ids = torch.where(torch.tensor(greedy)[:, None], logits_BV.argmax(dim=-1, keepdim=True), ids)
    return ids.squeeze(1).tolist(), logprobs_BV.gather(1, ids).squeeze(1).tolist()


def restrict(logprobs_V: Tensor, params: SamplingParams) -> Tensor:
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
