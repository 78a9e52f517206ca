"""What the model says of chosen tokens, and of no others.

Logits are the largest thing in a training step (tokens times vocabulary), and most tokens bear no loss. So the hidden
states are taken just before they enter the output layer, narrowed to the positions that predict a chosen token, and
log-probs are made of them block by block. A model whose way from hidden states to logits is not known
(`head.py`) makes logits itself, of the narrowed positions where its output layer is a module of its own.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from workers.train.model import chunked
from workers.train.model.chunked import NO_CHANCE, Entropy
from workers.train.model.head import Head, find_head, hidden_instead
from workers.train.model.layout import laid_out


class Readable(NamedTuple):
    """A model, and how it is read."""

    model: Any
    """A Hugging Face causal language model."""
    head: Head | None
    """Its own (`find_head`); None: its logits are taken as they are."""
    packed: bool = False
    """It is given rows one behind another, without padding."""
    within: nn.Module | None = None
    """Whose forward pass all that is read has to be within, for there alone weights are whole that ranks have in shards
    (`workers.train.ranks.sharding`); None where they are whole everywhere."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """A model that is whole here."""
        return cls(model, find_head(model))


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
    read: Readable,
    tokens_MT: Tensor,
    chosen_MT: Tensor,
    *,
    temperature: float,
    lengths_M: Tensor | None = None,
    entropy: Entropy = "",
    squares: bool = False,
    ends: bool = False,
) -> TokenLogprobs:
    """Log-probs of the chosen tokens under logits / temperature.

    Args:
        read: the model.
        tokens_MT: int64, padded on the right.
        chosen_MT: bool; never the first token of a row, which nothing predicts.
        temperature: of sampling; 0 (greedy) counts as 1.
        lengths_M: int64, tokens of each row; all of them unless given.
        entropy: compute the entropies too, without or with gradient.
        squares: compute the sums of squared probabilities too.
        ends: return the hidden states after the last tokens too.
    """
    if read.within is not None:
        whole, told = read._replace(within=None), {"entropy": entropy, "squares": squares, "ends": ends}
        inputs = (whole, tokens_MT, chosen_MT)
        found: TokenLogprobs = read.within(
            token_logprobs, *inputs, temperature=temperature, lengths_M=lengths_M, **told
        )
        return found
    rows, width = tokens_MT.shape
    if lengths_M is None:
        lengths_M = torch.full((rows,), width, dtype=torch.int64, device=tokens_MT.device)
    layout = laid_out(tokens_MT, lengths_M, packed=read.packed)
    rows_N, positions_N = chosen_MT.nonzero(as_tuple=True)
    places = layout.starts_M[rows_N] + positions_N - 1
    if ends:
        places = torch.cat([places, layout.starts_M + lengths_M - 1])
    targets_N, count = tokens_MT[chosen_MT], len(rows_N)
    temperature = temperature or 1.0
    if read.head is None:
        logits, hidden = _logits(read.model, layout.inputs, places)
        found = _of_logits(logits[:count], targets_N, temperature, entropy, squares=squares)
    else:
        hidden = _hidden(read.model, read.head, layout.inputs, places)
        found = TokenLogprobs(*_of_hidden(hidden[:count], read.head, targets_N, temperature, entropy, squares=squares))
    return TokenLogprobs(
        found.logprobs_N,
        found.entropy_N if entropy else None,
        found.squares_N if squares else None,
        None if hidden is None else hidden[:count].detach(),
        None if hidden is None or not ends else hidden[count:].detach(),
    )


def _hidden(model: Any, head: Head, inputs: dict[str, Any], places_N: Tensor) -> Tensor:
    """Last hidden states at these places of the flattened sequences; the model makes no logits."""
    caught: list[Tensor] = []

    def catch(hidden: Tensor) -> Tensor:
        caught.append(hidden.flatten(0, 1).index_select(0, places_N))
        return hidden[:, :0]

    with hidden_instead(head.layer, catch):
        model(**inputs, use_cache=False)
    return caught[0]


def _of_hidden(
    hidden_NH: Tensor, head: Head, targets_N: Tensor, temperature: float, entropy: Entropy, *, squares: bool
) -> chunked.Read:
    """Block by block."""
    finish = head.finish._replace(temperature=temperature)
    return chunked.read(hidden_NH, head.weight_VH, head.bias_V, targets_N, finish, entropy=entropy, squares=squares)


def _logits(model: Any, inputs: dict[str, Any], places_N: Tensor) -> tuple[Tensor, Tensor | None]:
    """The model's own logits at these places, and the hidden states that they were made from."""
    layer = model.get_output_embeddings()
    if layer is None:
        return model(**inputs, use_cache=False).logits.flatten(0, 1).index_select(0, places_N), None
    caught: list[Tensor] = []

    def narrow(hidden: Tensor) -> Tensor:
        caught.append(hidden.flatten(0, 1).index_select(0, places_N))
        return caught[0].unsqueeze(0)

    with hidden_instead(layer, narrow):
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits.squeeze(0), caught[0]


def _of_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy: Entropy, *, squares: bool
) -> TokenLogprobs:
    """All at once, of logits that are there."""
    if logits_NV.dtype not in {torch.float32, torch.float64}:
        logits_NV = logits_NV.float()
    logprobs_NV = (logits_NV / temperature).log_softmax(dim=-1)
    logprobs_N = logprobs_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
        # A token that cannot come has probability 0 and log-prob minus infinity: 0 times that is no number.
        entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=NO_CHANCE)).sum(dim=-1) if entropy else None
    with torch.no_grad():
        squares_N = (2 * logprobs_NV).exp().sum(dim=-1) if squares else None
    return TokenLogprobs(logprobs_N, entropy_N, squares_N)
