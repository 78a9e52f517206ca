"""Compares a learner with a checkpoint, bit for bit."""

from collections.abc import Iterator

import torch
from msgspec import Struct
from safetensors.torch import load_file
from torch import Tensor

from workers.train.checkpointing.checkpoint import OPTIMIZER, Checkpoint
from workers.train.step.learner import Learner


class CheckpointMatch(Struct, frozen=True, kw_only=True):
    """A checkpoint that a replay reproduced."""

    step: int
    checkpoint: str
    tensors: int
    """Number of equal tensors: weights, optimizer state, critic."""


class ReplayMismatch(Struct, frozen=True, kw_only=True):
    """The first difference between a replay and the run."""

    step: int
    description: str
    """For people."""
    checkpoint: str = ""
    tensor: str = ""
    max_difference: float | None = None
    """Largest absolute difference of an element; None if the difference is not numeric."""


class ReplayMismatchFound(Exception):  # noqa: N818  (it carries a result)
    """Ends a replay at the first difference."""

    def __init__(self, mismatch: ReplayMismatch) -> None:
        self.mismatch = mismatch


def compare_with_checkpoint(learner: Learner, checkpoint: Checkpoint) -> CheckpointMatch:
    """Compare all tensors of a learner with a checkpoint.

    Raises:
        ReplayMismatchFound: a tensor differs; names the first one.
        FileNotFoundError: the checkpoint was removed during the comparison.
    """
    tensors = 0
    for kind, ours, theirs in _states(learner, checkpoint):
        for name in sorted(ours.keys() | theirs.keys()):
            tensors += 1
            if name not in ours or name not in theirs:
                has = "the replay" if name in ours else "the checkpoint"
                raise _mismatch(checkpoint, name, f"{kind} {name} is in {has} alone", None)
            largest = _max_difference(ours[name], theirs[name])
            if largest is not None:
                raise _mismatch(checkpoint, name, f"{kind} {name} differs by up to {largest:.3g}", largest)
    return CheckpointMatch(step=checkpoint.progress.step, checkpoint=checkpoint.folder.name, tensors=tensors)


def _states(learner: Learner, checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """Yield kind, the learner's tensors and the checkpoint's: weights as written, then all other state."""
    policy = learner.policy
    whole = policy.parameters if policy.adapter else learner.weights()
    weights = {name: whole[name].detach().cpu().to(policy.saved_dtype).float() for name in policy.parameters}
    yield "weight", weights, policy.load_trained_weights(checkpoint.model)
    yield "state", learner.state(), load_file(checkpoint.folder / OPTIMIZER)


def _max_difference(ours: Tensor, theirs: Tensor) -> float | None:
    """Return the largest absolute difference of an element; None if all bits are equal."""
    if ours.shape == theirs.shape and ours.dtype == theirs.dtype:
        bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (ours, theirs)]
        if torch.equal(*bits):
            return None
        return float((ours.double() - theirs.double()).abs().max())
    return float("inf")


def _mismatch(checkpoint: Checkpoint, tensor: str, what: str, largest: float | None) -> ReplayMismatchFound:
    step = checkpoint.progress.step
    return ReplayMismatchFound(
        ReplayMismatch(
            step=step, description=what, checkpoint=checkpoint.folder.name, tensor=tensor, max_difference=largest
        )
    )
