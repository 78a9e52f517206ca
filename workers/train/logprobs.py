"""What the model says of chosen tokens, and of no others.

Logits are the largest thing in a training step (tokens times vocabulary), and most tokens bear no loss. So the hidden
states are narrowed to the positions that predict a chosen token just before they enter the output layer, by a hook: the
model's own code does all the rest, whatever it does to logits after that. A model whose output layer is not a module of
its own computes all logits, and they are narrowed then.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Of the chosen tokens, in row-major order."""

    logprobs_N: Tensor
    """float32 (float64 for a float64 model), with gradient unless under `no_grad`."""
    entropy_N: Tensor | None = None
    """Entropy in nats of the distribution that each was drawn from; None unless asked for."""
    squares_N: Tensor | None = None
    """Sum of the squared probabilities of that distribution, without gradient; None unless asked for."""
    hidden_NH: Tensor | None = None
    """Last hidden states before each token, without gradient; None where the output layer is no module of its own."""
    end_hidden_MH: Tensor | None = None
    """Last hidden state after the last token of each row; None unless asked for."""


def token_logprobs(
    model: Any,
    tokens_MT: Tensor,
    chosen_MT: Tensor,
    *,
    temperature: float,
    entropy: Literal["", "value", "gradient"] = "",
    squares: bool = False,
    lengths_M: Tensor | None = None,
) -> TokenLogprobs:
    """Log-probs of the chosen tokens under logits / temperature.

    Rows are padded on the right and attention is causal, so no attention mask is needed: nothing that counts can see
    the padding.

    Args:
        model: a Hugging Face causal language model.
        tokens_MT: int64.
        chosen_MT: bool; never the first token of a row, which nothing predicts.
        temperature: of sampling; 0 (greedy) counts as 1.
        entropy: compute the entropies too, without or with gradient.
        squares: compute the sums of squared probabilities too.
        lengths_M: int64, tokens of each row; where given, the hidden states after its last token are returned.
    """
    rows_N, positions_N = chosen_MT.nonzero(as_tuple=True)
    width = tokens_MT.shape[1]
    places = rows_N * width + positions_N - 1
    if lengths_M is not None:
        ends_M = torch.arange(len(lengths_M), device=lengths_M.device) * width + lengths_M - 1
        places = torch.cat([places, ends_M])
    logits, hidden = _logits(model, tokens_MT, places)
    count = len(rows_N)
    logits_NV = logits[:count]
    if logits_NV.dtype not in {torch.float32, torch.float64}:
        logits_NV = logits_NV.float()
    if temperature not in {0.0, 1.0}:
        logits_NV = logits_NV / temperature
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    logprobs_N = logprobs_NV.gather(1, tokens_MT[chosen_MT].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        squares_N = (2 * logprobs_NV).exp().sum(dim=-1) if squares else None
    return TokenLogprobs(
        logprobs_N,
        _entropy(logprobs_NV, gradient=entropy == "gradient") if entropy else None,
        squares_N,
        None if hidden is None else hidden[:count],
        None if hidden is None or lengths_M is None else hidden[count:],
    )


def _entropy(logprobs_NV: Tensor, *, gradient: bool) -> Tensor:
    with torch.set_grad_enabled(gradient):
        # A token that cannot come has probability 0 and log-prob minus infinity: 0 times that is no number.
        return -(logprobs_NV.exp() * logprobs_NV.clamp(min=-1e4)).sum(dim=-1)


def _logits(model: Any, tokens_MT: Tensor, places_N: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits at these places of the flattened rows, and the hidden states that they were made from."""
    narrowed: list[Tensor] = []

    def narrow(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        narrowed.append(inputs[0].flatten(0, 1).index_select(0, places_N))
        return (narrowed[0].unsqueeze(0), *inputs[1:])

    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(narrow) if head is not None else None
    try:
        logits: Tensor = model(input_ids=tokens_MT, use_cache=False).logits
    finally:
        if hook is not None:
            hook.remove()
    if narrowed:
        return logits.squeeze(0), narrowed[0].detach()
    return logits.flatten(0, 1).index_select(0, places_N), None
