"""Learning-rate schedules: a factor for each optimizer step."""

import math


def learning_rate_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Return the factor of the learning rate at a step.

    Args:
        step: optimizer batches done before this one, from 0.
        schedule: `constant`, `linear` or `cosine`; the last two decay from 1 after warm-up to 0 at `total_steps`.
        warmup_steps: steps of linear warm-up; the first step already has factor 1 / warmup_steps.
        total_steps: steps of the whole run; ignored by `constant`.

    Raises:
        ValueError: unknown schedule, or a decay without `total_steps`.

    Example:
        >>> [learning_rate_factor(s, schedule="linear", warmup_steps=2, total_steps=6) for s in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if schedule not in {"constant", "linear", "cosine"}:
        raise ValueError(f"unknown learning-rate schedule {schedule!r}; use constant, linear or cosine")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    if total_steps < 1:
        raise ValueError(f"a {schedule} learning rate must know where it ends; set train.max_steps")
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
