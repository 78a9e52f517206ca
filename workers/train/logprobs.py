"""The model's log-probs of chosen tokens, and of no others.

Logits are the largest thing in a training step (tokens times vocabulary), and most tokens bear no loss. So the hidden
states are narrowed to the positions that predict a chosen token just before they enter the output layer, by a hook: the
model's own code does all the rest, whatever it does to logits after that. A model whose output layer is not a module of
its own computes all logits, and they are narrowed then.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Of the chosen tokens, in row-major order."""

    logprobs_N: Tensor
    """float32 (float64 for a float64 model), with gradient unless under `no_grad`."""
    entropy_N: Tensor | None
    """Entropy in nats of the distribution that each was drawn from, without gradient; None unless asked for."""


def token_logprobs(
    model: Any,
    tokens_MT: Tensor,
    chosen_MT: Tensor,
    *,
    temperature: float,
    entropy: bool = False,
) -> TokenLogprobs:
    """Log-probs of the chosen tokens under logits / temperature.

    Rows are padded on the right and attention is causal, so no attention mask is needed: nothing that counts can see
    the padding.

    Args:
        model: a Hugging Face causal language model.
        tokens_MT: int64.
        chosen_MT: bool; never the first token of a row, which nothing predicts.
        temperature: of sampling; 0 (greedy) counts as 1.
        entropy: compute the entropies too.
    """
    rows_N, positions_N = chosen_MT.nonzero(as_tuple=True)
    before_N = rows_N * tokens_MT.shape[1] + positions_N - 1
    logits_NV = _logits(model, tokens_MT, before_N)
    if logits_NV.dtype not in {torch.float32, torch.float64}:
        logits_NV = logits_NV.float()
    if temperature not in {0.0, 1.0}:
        logits_NV = logits_NV / temperature
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    logprobs_N = logprobs_NV.gather(1, tokens_MT[chosen_MT].unsqueeze(1)).squeeze(1)
    if not entropy:
        return TokenLogprobs(logprobs_N, None)
    with torch.no_grad():
        return TokenLogprobs(logprobs_N, torch.special.entr(logprobs_NV.exp()).sum(dim=-1))


def _logits(model: Any, tokens_MT: Tensor, before_N: Tensor) -> Tensor:
    """Logits at these places of the flattened rows."""
    narrowed = False

    def narrow(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal narrowed
        narrowed = True
        return (inputs[0].flatten(0, 1).index_select(0, before_N).unsqueeze(0), *inputs[1:])

    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(narrow) if head is not None else None
    try:
        logits: Tensor = model(input_ids=tokens_MT, use_cache=False).logits
    finally:
        if hook is not None:
            hook.remove()
    return logits.squeeze(0) if narrowed else logits.flatten(0, 1).index_select(0, before_N)
