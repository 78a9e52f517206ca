"""Normalizers: values minus a mean, divided by a standard deviation, over the masked values only.

Each returns float64, exactly 0 outside the mask, and exactly 0 where all compared values are equal; an empty mask gives
zeros. Sums are over this process: to normalize over several ranks, gather the values first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.grouping import Grouping, tolerant_difference
from workers.train.algorithms.registry import Registry

LEVELS: Final = ("none", "group", "batch")
"""Scopes of a mean or a standard deviation."""
CENTERS: Final = ("completions", "tokens")
"""What counts once in the mean that whitening subtracts."""

NORMALIZERS: Final[Registry[None]] = Registry(
    "normalizer",
    {
        "values": "float, any shape; anything outside the mask",
        "mask": "bool, of the same shape; values that count",
        "weights": "number of tokens that each value stands for, of the same shape; None for one each",
        "values_C": "float, one per completion; anything outside B",
        "groups": "Grouping of the completions; its valid members are B",
        "loss_C": "bool, L: completions that count in batch statistics; None for all of B",
        "values_RT": "float, one per token; anything outside the mask",
        "mask_RT": "bool, tokens that count",
        "group_ids_R": "integer, the group that each row belongs to",
    },
)
"""Normalizers of rewards and advantages by name, for the property tests."""


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
    """Normalize to mean 0 and variance 1 over the mask.

    Args:
        values: any shape; anything outside the mask.
        mask: bool, of the same shape.
        weights: number of tokens that each value stands for; one each by default. Values of weight 0 do not count; if
            all weights are 0, the result is 0.
        unbiased: divide the sum of squares by n - 1, where n is the sum of weights.
        epsilon: added to the variance.
        shift: False keeps the mean and only scales the deviations.

    Returns:
        float64, of the same shape; 0 outside the mask.
    """
    if not values.numel():
        return values.double()
    counts = None if weights is None else torch.where(mask, weights.double(), 0.0)
    number = mask.sum() if counts is None else counts.sum()
    mask = mask & (number > 0)
    # Subtract one of the values first: equal values become exactly 0, and a large offset costs no digits.
    origin = torch.where(mask.any(), values.flatten()[mask.flatten().to(torch.uint8).argmax()], 0)
    shifted = torch.where(mask, values, origin).double() - origin
    mean = (shifted if counts is None else counts * shifted).sum() / _nonzero(number)
    centred = torch.where(mask, tolerant_difference(shifted, mean), 0.0)
    squares = centred.square() if counts is None else centred.square().mul_(counts)
    variance = squares.sum() / _nonzero(number - 1 if unbiased else number)
    whitened = centred.div_((variance + epsilon).clamp(min=_SMALLEST).sqrt())
    return whitened if shift else torch.where(mask, whitened + mean + origin, 0.0)


def whiten_for_completions(
    values: Tensor, mask: Tensor, weights: Tensor | None, counted: Tensor, *, center: str
) -> Tensor:
    """Whiten advantages over tokens, around the mean over completions or over tokens.

    With `completions`, whether to begin a completion at all is compared fairly: the mean advantage of the first tokens
    of those that bear loss is 0. A mean over tokens is nearer to the rewards of long completions. If these are the good
    ones, then the first token of a valid completion has a negative advantage on average, and completions that bear no
    loss gain on valid ones.

    Args:
        values: one per completion, or one per token.
        mask: bool, values to whiten.
        weights: number of tokens that each value stands for; None for one each.
        counted: bool, one value of each completion that bears loss: its own, or that of its first token.
        center: `completions` or `tokens`.

    Returns:
        float64, of the same shape; 0 outside the mask.

    Raises:
        ValueError: unknown `center`.
    """
    if center not in CENTERS:
        raise ValueError(f"unknown center {center!r}; use one of {', '.join(CENTERS)}")
    whitened: Tensor = whiten(values, mask, weights)
    if center == "tokens":
        return whitened
    counted = counted & mask
    mean = torch.where(counted, whitened, 0.0).sum() / counted.sum().clamp(min=1)
    difference = whitened - mean
    # What is whitened has size 1, so this is rounding noise, whose sign would depend on the order of the completions.
    return torch.where(mask & (difference.abs() > 1e-12), difference, 0.0)


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
    """Normalize rewards or advantages of completions, with separate scopes for mean and standard deviation.

    Args:
        values_C: one per completion.
        groups: of the completions; its valid members are B.
        loss_C: bool, L, completions that count in batch statistics; all of B by default.
        mean: scope of the mean that is subtracted: `none`, `group` or `batch`.
        std: scope of the standard deviation to divide by: `none`, `group` or `batch`. Deviations are from the chosen
            mean (0 for `none`). A single value has 1 if unbiased.
        leave_one_out: subtract the mean of the other values; a single value becomes 0.
        unbiased: divide the sum of squares by n - 1.
        epsilon: added to the standard deviation.

    Returns:
        float64 (C); 0 outside B.

    Raises:
        ValueError: unknown scope.
    """
    centred_C, divisor_C = center_and_divisor(
        values_C, groups, loss_C, mean=mean, std=std, leave_one_out=leave_one_out, unbiased=unbiased, epsilon=epsilon
    )
    return centred_C / divisor_C


def center_and_divisor(
    values_C: Tensor,
    groups: Grouping,
    loss_C: Tensor | None = None,
    *,
    mean: str,
    std: str,
    leave_one_out: bool,
    unbiased: bool,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Return the two halves of `normalize`: deviations from the mean, and the divisor of each completion's.

    The divisor leads other amounts of the same completion, such as the rewards of its turns, into the same unit.
    """
    pools = {
        "group": lambda: _Pool(
            groups.valid_C,
            number=groups.broadcast(groups.count_G),
            total=lambda x_C: groups.broadcast(groups.sum(x_C)),
            max=lambda x_C: groups.broadcast(groups.max(x_C)),
        ),
        "batch": lambda: _batch(groups.valid_C if loss_C is None else groups.valid_C & loss_C),
    }
    return _center_and_divisor(values_C, groups.valid_C, pools, mean, std, leave_one_out, unbiased, epsilon)


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
    """Normalize per token: every masked token counts once, so a long completion counts more.

    Args:
        values_RT: one per token.
        mask_RT: bool, tokens that count.
        group_ids_R: integers, the group of each row.
        mean: as in `normalize`.
        std: as in `normalize`.
        leave_one_out: as in `normalize`.
        unbiased: as in `normalize`.
        epsilon: as in `normalize`.

    Returns:
        float64 (R, T); 0 outside the mask.

    Raises:
        ValueError: unknown scope.
    """
    rows, lowest = Grouping(group_ids_R, mask_RT.any(dim=1)), float("-inf")

    def group_max(x_RT: Tensor) -> Tensor:
        masked_RT = torch.where(mask_RT, x_RT, lowest)
        max_R = masked_RT.amax(dim=1) if masked_RT.shape[1] else masked_RT.new_full(masked_RT.shape[:1], lowest)
        return rows.broadcast(rows.max(max_R)).unsqueeze(1)

    def total(x_RT: Tensor) -> Tensor:
        return rows.broadcast(rows.sum(torch.where(mask_RT, x_RT, 0).sum(dim=1))).unsqueeze(1)

    pools = {
        "group": lambda: _Pool(mask_RT, number=total(mask_RT), total=total, max=group_max),
        "batch": lambda: _batch(mask_RT),
    }
    centred_RT, divisor = _center_and_divisor(values_RT, mask_RT, pools, mean, std, leave_one_out, unbiased, epsilon)
    return centred_RT / divisor


@dataclass(frozen=True, slots=True)
class _Pool:
    """A set of values with common statistics: `counted` values enter them, and every value reads those of its pool."""

    counted: Tensor
    number: Tensor
    total: Callable[[Tensor], Tensor]
    max: Callable[[Tensor], Tensor]


def _batch(counted: Tensor) -> _Pool:
    """Return one pool of all values."""

    def batch_max(x: Tensor) -> Tensor:
        return torch.where(counted, x, float("-inf")).max() if x.numel() else x.sum()

    return _Pool(counted, number=counted.sum(), total=lambda x: torch.where(counted, x, 0.0).sum(), max=batch_max)


def _center_and_divisor(
    values: Tensor,
    valid: Tensor,
    pools: Mapping[str, Callable[[], _Pool]],
    mean: str,
    std: str,
    leave_one_out: bool,
    unbiased: bool,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    for level in (mean, std):
        if level not in LEVELS:
            raise ValueError(f"unknown scope {level!r}; use one of {', '.join(LEVELS)}")
    used = {level: pools[level]() for level in {mean, std} - {"none"}}
    centred = torch.where(valid, values.double(), 0.0)
    if mean != "none":
        centred = _centred(centred, valid, used[mean], leave_one_out)
    if std == "none":
        return centred, torch.ones_like(centred)
    number = used[std].number
    deviation = (used[std].total(centred.square()) / _nonzero(number - 1 if unbiased else number)).sqrt()
    deviation = torch.where(number > (1 if unbiased else 0), deviation, 1.0)
    return centred, (deviation + epsilon).clamp(min=_SMALLEST).expand_as(centred)


def _centred(values: Tensor, valid: Tensor, pool: _Pool, leave_one_out: bool) -> Tensor:
    """Subtract the mean of each value's pool, or of its other values; 0 if all are equal, none counts, or outside."""
    highest, number = pool.max(values), pool.number
    origin = torch.where(torch.isfinite(highest), highest, 0.0)
    shifted = torch.where(valid, values, origin) - origin
    total = pool.total(shifted)
    if leave_one_out:
        own = pool.counted.double()
        total, number = total - own * shifted, number - own
    return torch.where(valid & (number > 0), tolerant_difference(shifted, total / _nonzero(number)), 0.0)


def _nonzero(number: Tensor) -> Tensor:
    """Return a safe divisor: 1 where the number is not positive."""
    return torch.where(number > 0, number, 1)


_SMALLEST: Final = torch.finfo(torch.float64).tiny
