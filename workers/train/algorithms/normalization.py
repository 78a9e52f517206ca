"""Normalisers: values less a mean, divided by a spread, over what counts alone.

All of them return float64, exactly 0 outside of the mask, and exactly 0 where everything that is compared is equal; an
empty mask gives zeros. The sums are of this process: to normalise over several ranks, gather the values first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.registry import Registry
from workers.train.algorithms.rounding import tolerant_difference

LEVELS: Final = ("none", "group", "batch")
"""What a mean or a standard deviation may be of."""

NORMALIZERS: Final[Registry[None]] = Registry(
    "normaliser",
    {
        "values": "float, any shape; anything outside of the mask",
        "mask": "bool, of the same shape; what counts",
        "weights": "how many tokens each value stands for, of the same shape; None: one each",
        "values_C": "float, one for each completion; anything outside of B",
        "groups": "Grouping of the completions; its valid members are B",
        "loss_C": "bool, L: completions that count in statistics of the batch; None: all of B",
        "values_RT": "float, one for each token; anything outside of the mask",
        "mask_RT": "bool, tokens that count",
        "group_ids_R": "integer, the group that each row belongs to",
    },
)
"""Those that shape rewards and advantages, for the property tests."""


@NORMALIZERS.register(
    "whiten",
    None,
    formula="(x - mean) / sqrt(var + eps)",
    source="verl torch_functional.masked_whiten; Schulman et al. 2017, arXiv:1707.06347 (implementations)",
)
def whiten(
    values: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    *,
    unbiased: bool = True,
    epsilon: float = 1e-8,
    shift: bool = True,
) -> Tensor:
    """Mean 0 and variance 1 over everything in the mask.

    Args:
        values: any shape; anything outside of the mask.
        mask: bool, of the same shape.
        weights: how many tokens each value stands for; one each unless given. A weight of 0 has no vote; where nobody
            has one, all are 0.
        unbiased: divide the sum of squares by n - 1, n being the sum of weights.
        epsilon: added to the variance.
        shift: False keeps the mean and scales the deviations alone.

    Returns:
        float64, of the same shape; 0 outside of the mask.
    """
    if not values.numel():
        return values.double()
    counts = None if weights is None else torch.where(mask, weights.double(), 0.0)
    number = mask.sum() if counts is None else counts.sum()
    mask = mask & (number > 0)
    # Less one of them first: equal values are exactly 0 then, and a large offset costs no digits.
    origin = torch.where(mask.any(), values.flatten()[mask.flatten().to(torch.uint8).argmax()], 0)
    shifted = torch.where(mask, values, origin).double() - origin
    mean = (shifted if counts is None else counts * shifted).sum() / _or_one(number)
    centred = torch.where(mask, tolerant_difference(shifted, mean), 0.0)
    squares = centred.square() if counts is None else centred.square().mul_(counts)
    variance = squares.sum() / _or_one(number - 1 if unbiased else number)
    whitened = centred.div_((variance + epsilon).clamp(min=_SMALLEST).sqrt())
    return whitened if shift else torch.where(mask, whitened + mean + origin, 0.0)


@NORMALIZERS.register(
    "normalize",
    None,
    formula="(x - mean) / (std + eps), mean and std of the group, the batch or neither",
    source="AReaL utils/data.py Normalization; leave-one-out: Kool et al. 2019, ICLR workshop drlStructPred",
)
def normalize(
    values_C: Tensor,
    groups: Grouping,
    loss_C: Tensor | None = None,
    *,
    mean: str,
    std: str,
    leave_one_out: bool,
    unbiased: bool,
    epsilon: float,
) -> Tensor:
    """Normalise rewards or advantages of completions, with the levels of mean and spread chosen apart.

    Args:
        values_C: one for each completion.
        groups: of the completions; its valid members are B.
        loss_C: bool, completions that count where a statistic is of the batch: L. All of B unless given.
        mean: what is subtracted: `none`, or the mean of the `group` or the `batch`.
        std: what it is divided by: `none`, or the standard deviation, around the mean chosen (0 where that is `none`),
            in the `group` or the `batch`. A single value has 1 if unbiased.
        leave_one_out: subtract the mean of the others; a single value becomes 0.
        unbiased: divide the sum of squares by n - 1.
        epsilon: added to the standard deviation; not where that is `none`.

    Returns:
        float64 (C); 0 outside of B.

    Raises:
        ValueError: a level that does not exist.
    """
    pools = {
        "group": lambda: _Pool(
            groups.valid_C,
            number=groups.broadcast(groups.count_G),
            total=lambda x_C: groups.broadcast(groups.sum(x_C)),
            largest=lambda x_C: groups.broadcast(groups.max(x_C)),
        ),
        "batch": lambda: _batch(groups.valid_C if loss_C is None else groups.valid_C & loss_C),
    }
    return _normalized(values_C, groups.valid_C, pools, mean, std, leave_one_out, unbiased, epsilon)


@NORMALIZERS.register(
    "normalize_tokens",
    None,
    formula="(x - mean) / (std + eps), mean and std of the group's tokens, the batch's or neither",
    source="AReaL utils/data.py Normalization",
)
def normalize_tokens(
    values_RT: Tensor,
    mask_RT: Tensor,
    group_ids_R: Tensor,
    *,
    mean: str,
    std: str,
    leave_one_out: bool,
    unbiased: bool,
    epsilon: float,
) -> Tensor:
    """The same for tokens: every token of the mask has one vote, so a long completion has many.

    Args:
        values_RT: one for each token.
        mask_RT: bool, tokens that count.
        group_ids_R: integers, the group that each row belongs to.
        mean: as in `normalize`.
        std: as in `normalize`.
        leave_one_out: as in `normalize`.
        unbiased: as in `normalize`.
        epsilon: as in `normalize`.

    Returns:
        float64 (R, T); 0 outside of the mask.

    Raises:
        ValueError: a level that does not exist.
    """
    rows, lowest = Grouping(group_ids_R, mask_RT.any(dim=1)), float("-inf")

    def largest(x_RT: Tensor) -> Tensor:
        filled_RT = torch.where(mask_RT, x_RT, lowest)
        largest_R = filled_RT.amax(dim=1) if filled_RT.shape[1] else filled_RT.new_full(filled_RT.shape[:1], lowest)
        return rows.broadcast(rows.max(largest_R)).unsqueeze(1)

    def total(x_RT: Tensor) -> Tensor:
        return rows.broadcast(rows.sum(torch.where(mask_RT, x_RT, 0).sum(dim=1))).unsqueeze(1)

    pools = {
        "group": lambda: _Pool(mask_RT, number=total(mask_RT), total=total, largest=largest),
        "batch": lambda: _batch(mask_RT),
    }
    return _normalized(values_RT, mask_RT, pools, mean, std, leave_one_out, unbiased, epsilon)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Those that a statistic is of: it is taken over the voting ones, and every value is given its own pool's."""

    voting: Tensor
    number: Tensor
    total: Callable[[Tensor], Tensor]
    largest: Callable[[Tensor], Tensor]


def _batch(voting: Tensor) -> _Pool:
    """One pool of everything."""

    def largest(x: Tensor) -> Tensor:
        return torch.where(voting, x, float("-inf")).max() if x.numel() else x.sum()

    return _Pool(voting, number=voting.sum(), total=lambda x: torch.where(voting, x, 0.0).sum(), largest=largest)


def _normalized(
    values: Tensor,
    valid: Tensor,
    pools: Mapping[str, Callable[[], _Pool]],
    mean: str,
    std: str,
    leave_one_out: bool,
    unbiased: bool,
    epsilon: float,
) -> Tensor:
    for level in (mean, std):
        if level not in LEVELS:
            raise ValueError(f"unknown level {level!r}; use one of {', '.join(LEVELS)}")
    used = {level: pools[level]() for level in {mean, std} - {"none"}}
    centred = torch.where(valid, values.double(), 0.0)
    if mean != "none":
        centred = _centred(centred, valid, used[mean], leave_one_out)
    if std == "none":
        return centred
    number = used[std].number
    spread = (used[std].total(centred.square()) / _or_one(number - 1 if unbiased else number)).sqrt()
    spread = torch.where(number > (1 if unbiased else 0), spread, 1.0)
    return centred / (spread + epsilon).clamp(min=_SMALLEST)


def _centred(values: Tensor, valid: Tensor, pool: _Pool, leave_one_out: bool) -> Tensor:
    """Values less the mean of their pool, or of the others in it; 0 where all are equal, nobody votes, and outside."""
    largest, number = pool.largest(values), pool.number
    origin = torch.where(torch.isfinite(largest), largest, 0.0)
    shifted = torch.where(valid, values, origin) - origin
    total = pool.total(shifted)
    if leave_one_out:
        own = pool.voting.double()
        total, number = total - own * shifted, number - own
    return torch.where(valid & (number > 0), tolerant_difference(shifted, total / _or_one(number)), 0.0)


def _or_one(number: Tensor) -> Tensor:
    """A number to divide by: 1 where there is nothing to divide."""
    return torch.where(number > 0, number, 1)


_SMALLEST: Final = torch.finfo(torch.float64).tiny
