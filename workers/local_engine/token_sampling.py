"""Sample one token per row, with its log-prob under the distribution that it comes from, and find stop strings."""

from collections.abc import Collection, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from stream.errors import EngineError, EngineRefusedError
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


class StopStringMatcher:
    """Searches the sampled text of one request; stores only its end, where a stop string may begin.

    Args:
        tokenizer: tokenizer of the model.
        prompt: tokens before the sampled text.
        stops: stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        self._stops = stops
        self._tail_length = max(map(len, stops)) - 1
        self._tail = ""

    def append(self, token: int, *, may_stop: bool) -> bool:
        """Append a token. Returns whether it completes a stop string; always False without `may_stop`."""
        before, text = len(self._tail), self._tail + (self._stream.step(self._tokenizer, token) or "")
        self._tail = text[-self._tail_length :] if self._tail_length else ""
        return may_stop and any(stop in text[max(0, before + 1 - len(stop)) :] for stop in self._stops)


def load_tokenizer(model: Path) -> Tokenizer | None:
    """Load `tokenizer.json` of a model folder; None if there is none.

    Raises:
        EngineError: the file cannot be read.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain `Exception`
        raise EngineError(f"{file} is not a readable tokenizer: {error}; download it again") from error


def make_matcher(tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> StopStringMatcher | None:
    """Return a matcher for a request's stop strings; None if it has none.

    Raises:
        EngineRefusedError: a stop string is empty, or the model has no tokenizer.
    """
    if not stops:
        return None
    if not all(stops):
        raise EngineRefusedError("stop contains an empty string, which would end every turn before it begins")
    if tokenizer is None:
        raise EngineRefusedError("stop: this model has no tokenizer.json to decode tokens with; use stop_token_ids")
    return StopStringMatcher(tokenizer, prompt, stops)
