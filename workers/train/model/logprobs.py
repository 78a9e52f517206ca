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
from workers.train.model.chunked import MIN_LOGPROB, EntropyMode
from workers.train.model.input_layout import lay_out
from workers.train.model.lm_head import LMHead, find_lm_head, replace_hidden


class LogprobModel(NamedTuple):
    """A model, and how it is read."""

    model: Any
    """A Hugging Face causal language model."""
    head: LMHead | None
    """Its own (`find_lm_head`); None: its logits are taken as they are."""
    packed: bool = False
    """It is given rows one behind another, without padding."""
    sharded_root: nn.Module | None = None
    """Whose forward pass all that is read has to be within, for there alone weights are whole that ranks have in shards
    (`sharded_model`); None where they are whole everywhere."""

    @classmethod
    def from_whole(cls, model: Any) -> Self:
        """A model that is whole here."""
        return cls(model, find_lm_head(model))


class TokenLogprobs(NamedTuple):
    """Of the chosen tokens, in row-major order."""

    logprobs_N: Tensor
    """float32 (float64 for a float64 model), with gradient unless under `no_grad`."""
    entropy_N: Tensor | None = None
    """Entropy in nats of the distribution that each was drawn from; None unless asked for."""
    sum_pi_squared_N: Tensor | None = None
    """Sum of the squared probabilities of that distribution, without gradient; None unless asked for."""
    hidden_NH: Tensor | None = None
    """Last hidden states before each token, without gradient; None where the output layer is no module of its own."""
    end_hidden_MH: Tensor | None = None
    """Last hidden state after the last token of each row; None unless asked for."""


def token_logprobs(
    model: LogprobModel,
    tokens_MT: Tensor,
    chosen_MT: Tensor,
    *,
    temperature: float,
    lengths_M: Tensor | None = None,
    entropy: EntropyMode = "",
    sum_pi_squared: bool = False,
    end_states: bool = False,
) -> TokenLogprobs:
    """Log-probs of the chosen tokens under logits / temperature.

    Args:
        model: the model.
        tokens_MT: int64, padded on the right.
        chosen_MT: bool; never the first token of a row, which nothing predicts.
        temperature: of sampling; 0 (greedy) counts as 1.
        lengths_M: int64, tokens of each row; all of them unless given.
        entropy: compute the entropies too, without or with gradient.
        sum_pi_squared: compute the sums of squared probabilities too.
        end_states: return the hidden states after the last tokens too.
    """
    if model.sharded_root is not None:
        unsharded = model._replace(sharded_root=None)
        inputs = (unsharded, tokens_MT, chosen_MT)
        options = {"entropy": entropy, "sum_pi_squared": sum_pi_squared, "end_states": end_states}
        found: TokenLogprobs = model.sharded_root(
            token_logprobs, *inputs, temperature=temperature, lengths_M=lengths_M, **options
        )
        return found
    rows, width = tokens_MT.shape
    if lengths_M is None:
        lengths_M = torch.full((rows,), width, dtype=torch.int64, device=tokens_MT.device)
    layout = lay_out(tokens_MT, lengths_M, packed=model.packed)
    rows_N, positions_N = chosen_MT.nonzero(as_tuple=True)
    places = layout.starts_M[rows_N] + positions_N - 1
    if end_states:
        places = torch.cat([places, layout.starts_M + lengths_M - 1])
    targets_N, count = tokens_MT[chosen_MT], len(rows_N)
    temperature = temperature or 1.0
    if model.head is None:
        logits, hidden = _logits(model.model, layout.inputs, places)
        found = _from_logits(logits[:count], targets_N, temperature, entropy, squares=sum_pi_squared)
    else:
        hidden = _hidden(model.model, model.head, layout.inputs, places)
        found = TokenLogprobs(
            *_from_hidden(hidden[:count], model.head, targets_N, temperature, entropy, squares=sum_pi_squared)
        )
    return TokenLogprobs(
        found.logprobs_N,
        found.entropy_N if entropy else None,
        found.sum_pi_squared_N if sum_pi_squared else None,
        None if hidden is None else hidden[:count].detach(),
        None if hidden is None or not end_states else hidden[count:].detach(),
    )


def _hidden(model: Any, head: LMHead, inputs: dict[str, Any], places_N: Tensor) -> Tensor:
    """Last hidden states at these places of the flattened sequences; the model makes no logits."""
    caught: list[Tensor] = []

    def catch(hidden: Tensor) -> Tensor:
        caught.append(hidden.flatten(0, 1).index_select(0, places_N))
        return hidden[:, :0]

    with replace_hidden(head.layer, catch):
        model(**inputs, use_cache=False)
    return caught[0]


def _from_hidden(
    hidden_NH: Tensor, head: LMHead, targets_N: Tensor, temperature: float, entropy: EntropyMode, *, squares: bool
) -> chunked.ChunkedLogprobs:
    """Block by block."""
    finish = head.transform._replace(temperature=temperature)
    return chunked.chunked_logprobs(
        hidden_NH, head.weight_VH, head.bias_V, targets_N, finish, entropy=entropy, sum_pi_squared=squares
    )


def _logits(model: Any, inputs: dict[str, Any], places_N: Tensor) -> tuple[Tensor, Tensor | None]:
    """The model's own logits at these places, and the hidden states that they were made from."""
    layer = model.get_output_embeddings()
    if layer is None:
        return model(**inputs, use_cache=False).logits.flatten(0, 1).index_select(0, places_N), None
    caught: list[Tensor] = []

    def narrow(hidden: Tensor) -> Tensor:
        caught.append(hidden.flatten(0, 1).index_select(0, places_N))
        return caught[0].unsqueeze(0)

    with replace_hidden(layer, narrow):
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits.squeeze(0), caught[0]


def _from_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy: EntropyMode, *, squares: bool
) -> TokenLogprobs:
    """All at once, of logits that are there."""
    if logits_NV.dtype not in {torch.float32, torch.float64}:
        logits_NV = logits_NV.float()
    logprobs_NV = (logits_NV / temperature).log_softmax(dim=-1)
    logprobs_N = logprobs_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
        # A token that cannot come has probability 0 and log-prob minus infinity: 0 times that is no number.
        entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=MIN_LOGPROB)).sum(dim=-1) if entropy else None
    with torch.no_grad():
        sum_pi_squared_N = (2 * logprobs_NV).exp().sum(dim=-1) if squares else None
    return TokenLogprobs(logprobs_N, entropy_N, sum_pi_squared_N)
