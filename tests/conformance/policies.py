"""The file's words around policy losses: names, options, aggregation, the share of a batch."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from tests.conformance.cases import named
from workers.train.algorithms.aggregation import AGGREGATIONS, BatchTotals, row_factors
from workers.train.algorithms.losses import LOSSES, LossInputs, LossOutput, policy_loss
from workers.train.algorithms.sequences import Sequences
from workers.train.algorithms.token_selection import SELECTORS, select_tokens

LOSS_NAMES: Final = {"vanilla": "clipped"}
"""Our names for names of the file; other names are the same."""
SEED: Final = 0
"""Of selectors that draw: cases with them take every token that may be drawn."""


def loss_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """verl's configuration of its losses as our options; missing keys take verl's defaults."""
    given = {name: value for name, value in {**config.get("policy_loss", {}), **config}.items() if value is not None}
    both = given.get("clip_ratio", 0.2)
    return {
        "clip_low": given.get("clip_ratio_low", both),
        "clip_high": given.get("clip_ratio_high", both),
        "dual_clip": given.get("clip_ratio_c", 3.0),
        "ratio_cap": given.get("clip_ratio_c", 3.0),
        "level": "token",
        "tau_positive": given.get("tau_pos", 1.0),
        "tau_negative": given.get("tau_neg", 1.05),
        "clip_cov_ratio": given.get("clip_cov_ratio", 2e-4),
        "clip_cov_low": given.get("clip_cov_lb", 1.0),
        "clip_cov_high": given.get("clip_cov_ub", 5.0),
        "kl_cov_ratio": given.get("kl_cov_ratio", 2e-4),
        "kl_cov_coefficient": given.get("ppo_kl_coef", 0.1),
        "dro_beta": given.get("dro_beta"),
    }


def case_row_factors(aggregation: str, mask_RT: Tensor, info: Mapping[str, Any] | None = None) -> Tensor:
    """Every row's factor; `info` says of how large a batch these rows are a part."""
    named(AGGREGATIONS, aggregation, "aggregation")
    given = {name: value for name, value in (info or {}).items() if value is not None}
    length_R = mask_RT.sum(dim=1)
    totals = BatchTotals(
        tokens=given.get("batch_num_tokens", int(length_R.sum())),
        completions=given.get("global_batch_size", int((length_R > 0).sum())),
        ranks=given.get("dp_size", 1),
    )
    return row_factors(aggregation, length_R, totals, constant=given.get("loss_scale_factor", mask_RT.shape[1]))


def loss_of(
    name: str,
    logprobs_RT: Tensor,
    *,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    mask_RT: Tensor,
    aggregation: str,
    info: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    weights_RT: Tensor | None = None,
    forced: bool = True,
) -> LossOutput:
    """Our loss; every row is a completion.

    Args:
        name: ours.
        logprobs_RT: of the policy now, a leaf.
        proximal_RT: what ratios are taken against.
        advantages_RT: of each token.
        mask_RT: tokens that bear loss.
        aggregation: ours, which are verl's by name.
        info: of the whole batch, or None where these rows are all of it.
        options: ours.
        weights_RT: importance weights.
        forced: the aggregation that a loss insists on counts, as it does in the trainer.
    """
    declared = named(LOSSES, name, "loss").traits
    selected_RT = None
    if declared.selector:
        named(SELECTORS, declared.selector, "selector")
        drawing = torch.Generator().manual_seed(SEED)
        selected_RT = select_tokens(
            declared.selector, logprobs_RT.detach(), proximal_RT, advantages_RT, mask_RT, drawing, options
        )
    return policy_loss(
        name,
        LossInputs(
            logprobs_RT=logprobs_RT,
            proximal_RT=proximal_RT,
            advantages_RT=advantages_RT,
            weights_RT=weights_RT,
            selected_RT=selected_RT,
            sequences=Sequences(mask_RT, torch.arange(len(mask_RT))),
        ),
        case_row_factors((forced and declared.aggregation) or aggregation, mask_RT, info),
        options,
    )
