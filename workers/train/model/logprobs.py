"""Log-probs of selected tokens only.

Logits are the largest tensor of a training step (tokens times vocabulary), and most tokens bear no loss. So hidden
states are captured before the output layer, narrowed to the positions that predict a selected token, and turned into
log-probs block by block. A model whose transform from hidden states to logits is unknown (`lm_head.py`) computes the
logits itself, of the narrowed positions if its output layer is a separate module.

Model inputs from rows: padded to one length, packed one after another, or as the prefix tree that they share.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from workers.train.model import logit_blocks
from workers.train.model.attention_kernels import TREE, switch_attention
from workers.train.model.lm_head import LMHead, find_lm_head, replace_hidden
from workers.train.model.logit_blocks import MIN_LOGPROB, EntropyMode
from workers.train.model.prefix_tree import PrefixTree


class LogprobModel(NamedTuple):
    """A model with everything needed to compute log-probs with it."""

    model: Any
    """A Hugging Face causal language model."""
    head: LMHead | None
    """Found by `find_lm_head`; None to use the model's own logits."""
    packed: bool = False
    """True if rows are concatenated without padding."""
    row_attention: str = ""
    """Attention implementation for rows apart; needed only with `can_share`."""
    can_share: bool = False
    """True if rows may run as the prefix tree that they share."""
    tree: PrefixTree | None = None
    """The prefix tree of the rows that are passed, if they share it; only with `can_share`."""
    sharded_root: nn.Module | None = None
    """Module whose forward pass gathers sharded weights (`sharded_model.ShardedRoot`); None if nothing is sharded."""

    @classmethod
    def from_whole(cls, model: Any) -> Self:
        """Wrap a model that is not sharded."""
        return cls(model, find_lm_head(model))


class TokenLogprobs(NamedTuple):
    """Results of the selected tokens, in row-major order."""

    logprobs_N: Tensor
    """float32 (float64 for a float64 model), with gradient unless under `no_grad`."""
    entropy_N: Tensor | None = None
    """Entropy in nats of the distribution that each token was drawn from; None unless requested."""
    sum_pi_squared_N: Tensor | None = None
    """Sum of squared probabilities of that distribution, without gradient; None unless requested."""
    hidden_NH: Tensor | None = None
    """Last hidden state before each token, without gradient; None if the output layer is not a separate module."""
    end_hidden_MH: Tensor | None = None
    """Last hidden state after the last token of each row; None unless requested."""


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
    """Compute log-probs of selected tokens under logits / temperature.

    Args:
        model: the model, and how rows are laid out for it.
        tokens_MT: int64, padded on the right.
        chosen_MT: bool, the selected tokens; never the first token of a row, which nothing predicts.
        temperature: of sampling; 0 (greedy) is treated as 1.
        lengths_M: int64, tokens of each row without padding; full rows by default.
        entropy: whether to compute entropies, without or with gradient.
        sum_pi_squared: whether to compute sums of squared probabilities.
        end_states: whether to return the hidden states after the last tokens.
    """
    if model.sharded_root is not None:
        gathered: TokenLogprobs = model.sharded_root(
            token_logprobs,
            model._replace(sharded_root=None),
            tokens_MT,
            chosen_MT,
            temperature=temperature,
            lengths_M=lengths_M,
            entropy=entropy,
            sum_pi_squared=sum_pi_squared,
            end_states=end_states,
        )
        return gathered
    if lengths_M is None:
        lengths_M = tokens_MT.new_full(tokens_MT.shape[:1], tokens_MT.shape[1])
    layout = _lay_out_for(model, tokens_MT, lengths_M)
    rows_N, columns_N = chosen_MT.nonzero(as_tuple=True)
    positions = layout.places_MT[rows_N, columns_N - 1]
    if end_states:
        positions = torch.cat([positions, layout.places_MT.gather(1, lengths_M.unsqueeze(1) - 1).squeeze(1)])
    return logprobs_at(
        model,
        layout.inputs,
        positions,
        tokens_MT[chosen_MT],
        temperature=temperature,
        entropy=entropy,
        sum_pi_squared=sum_pi_squared,
    )


def logprobs_at(
    model: LogprobModel,
    inputs: dict[str, Any],
    positions: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    entropy: EntropyMode = "",
    sum_pi_squared: bool = False,
) -> TokenLogprobs:
    """Compute log-probs of targets from model inputs.

    Args:
        model: the model, with its attention set for these inputs.
        inputs: keyword arguments of the model.
        positions: int64, where in the flattened inputs each target is predicted; any end states follow.
        targets_N: int64.
        temperature: as in `token_logprobs`, and so are the others.
        entropy: whether to compute entropies.
        sum_pi_squared: whether to compute sums of squared probabilities.
    """
    count, temperature = len(targets_N), temperature or 1.0
    if model.head is None:
        logits, hidden = _logits(model.model, inputs, positions)
        outputs = _from_logits(logits[:count], targets_N, temperature, entropy, squares=sum_pi_squared)
    else:
        hidden = _hidden(model.model, model.head, inputs, positions)
        outputs = TokenLogprobs(
            *_from_hidden(hidden[:count], model.head, targets_N, temperature, entropy, squares=sum_pi_squared)
        )
    return TokenLogprobs(
        outputs.logprobs_N,
        outputs.entropy_N if entropy else None,
        outputs.sum_pi_squared_N if sum_pi_squared else None,
        None if hidden is None else hidden[:count].detach(),
        None if hidden is None or len(positions) == count else hidden[count:].detach(),
    )


def _lay_out_for(model: LogprobModel, tokens_MT: Tensor, lengths_M: Tensor) -> "ModelInputs":
    """Convert rows to inputs as the model's fields say, and set its attention for them.

    The attention stays set after the pass, because layers that are recomputed in the backward pass need the same one.
    """
    if model.can_share:
        switch_attention(model.model, model.row_attention if model.tree is None else TREE)
    if model.tree is None:
        return lay_out(tokens_MT, lengths_M, packed=model.packed)
    return lay_out_tree(model.tree)


def _hidden(model: Any, head: LMHead, inputs: dict[str, Any], positions_N: Tensor) -> Tensor:
    """Return last hidden states at these positions of the flattened rows; the model computes no logits."""
    captured: list[Tensor] = []

    def catch(hidden: Tensor) -> Tensor:
        captured.append(hidden.flatten(0, 1).index_select(0, positions_N))
        return hidden[:, :0]

    with replace_hidden(head.layer, catch):
        model(**inputs, use_cache=False)
    return captured[0]


def _from_hidden(
    hidden_NH: Tensor, head: LMHead, targets_N: Tensor, temperature: float, entropy: EntropyMode, *, squares: bool
) -> logit_blocks.ChunkedLogprobs:
    """Compute log-probs from hidden states, block by block."""
    transform = head.transform._replace(temperature=temperature)
    return logit_blocks.chunked_logprobs(
        hidden_NH, head.weight_VH, head.bias_V, targets_N, transform, entropy=entropy, sum_pi_squared=squares
    )


def _logits(model: Any, inputs: dict[str, Any], positions_N: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the model's own logits at these positions, and the hidden states if the output layer is a module."""
    layer = model.get_output_embeddings()
    if layer is None:
        return model(**inputs, use_cache=False).logits.flatten(0, 1).index_select(0, positions_N), None
    captured: list[Tensor] = []

    def narrow(hidden: Tensor) -> Tensor:
        captured.append(hidden.flatten(0, 1).index_select(0, positions_N))
        return captured[0].unsqueeze(0)

    with replace_hidden(layer, narrow):
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits.squeeze(0), captured[0]


def _from_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy: EntropyMode, *, squares: bool
) -> TokenLogprobs:
    """Compute log-probs from logits, all at once."""
    if logits_NV.dtype not in {torch.float32, torch.float64}:
        logits_NV = logits_NV.float()
    logprobs_NV = (logits_NV / temperature).log_softmax(dim=-1)
    logprobs_N = logprobs_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
        # An impossible token has probability 0 and log-prob minus infinity, whose product is NaN.
        entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=MIN_LOGPROB)).sum(dim=-1) if entropy else None
    with torch.no_grad():
        sum_pi_squared_N = (2 * logprobs_NV).exp().sum(dim=-1) if squares else None
    return TokenLogprobs(logprobs_N, entropy_N, sum_pi_squared_N)


class ModelInputs(NamedTuple):
    """Rows as a model takes them."""

    inputs: dict[str, Any]
    """Keyword arguments of the model."""
    places_MT: Tensor
    """int64, where each token of a row is in the flattened inputs; anywhere for padding."""


def lay_out(tokens_MT: Tensor, lengths_M: Tensor, *, packed: bool) -> ModelInputs:
    """Convert right-padded rows to model inputs.

    Example, rows [1 2 3] and [4 5]::

        padded    input_ids [[1 2 3] [4 5 0]]
        packed    input_ids [[1 2 3 4 5]]  position_ids [[0 1 2 0 1]]  cu_seq_lens 0 3 5

    Attention is causal, so right padding needs no mask. Packed rows are separated by positions that restart at 0 and by
    their bounds; the model's attention uses one of the two.
    """
    rows, width = tokens_MT.shape
    if not packed:
        return ModelInputs(
            {"input_ids": tokens_MT}, torch.arange(rows * width, device=tokens_MT.device).view(rows, width)
        )
    positions_MT = torch.arange(width, device=tokens_MT.device).expand(rows, width)
    real_MT = positions_MT < lengths_M.unsqueeze(1)
    ends_M = lengths_M.cumsum(0)
    bounds = torch.nn.functional.pad(ends_M, (1, 0)).to(torch.int32)
    longest = int(lengths_M.max())
    inputs = {
        "input_ids": tokens_MT[real_MT].unsqueeze(0),
        "position_ids": positions_MT[real_MT].unsqueeze(0),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return ModelInputs(inputs, (ends_M - lengths_M).unsqueeze(1) + positions_MT)


def lay_out_tree(tree: PrefixTree) -> ModelInputs:
    """Convert a prefix tree to model inputs: its places in one row, each with its depth as its position."""
    inputs = {
        "input_ids": tree.tokens_P.unsqueeze(0),
        "position_ids": tree.depths_P.unsqueeze(0),
        "prefix_tree": tree,
    }
    return ModelInputs(inputs, tree.places_MT)
