"""What a learner holds against a checkpoint, bit for bit."""

from collections.abc import Iterator

import torch
from msgspec import Struct
from safetensors.torch import load_file
from torch import Tensor

from workers.train.keeping.checkpoint import OPTIMIZER, Checkpoint
from workers.train.step.learner import Learner


class Agreement(Struct, frozen=True, kw_only=True):
    """A checkpoint that was met."""

    step: int
    checkpoint: str
    tensors: int
    """Compared, and equal: weights, optimizer state, critic."""


class Difference(Struct, frozen=True, kw_only=True):
    """The first thing that came out otherwise."""

    step: int
    what: str
    """In words."""
    checkpoint: str = ""
    tensor: str = ""
    largest: float | None = None
    """Largest difference of an element; None where it is no matter of numbers."""


class Differs(Exception):  # noqa: N818  (no error: it is what was asked)
    """Ends a replay, whose answer it is."""

    def __init__(self, difference: Difference) -> None:
        self.difference = difference


def compare(learner: Learner, checkpoint: Checkpoint) -> Agreement:
    """Compare all tensors.

    Raises:
        Differs: the first that is not equal.
        FileNotFoundError: the checkpoint was removed meanwhile.
    """
    tensors = 0
    for kind, ours, theirs in _states(learner, checkpoint):
        for name in sorted(ours.keys() | theirs.keys()):
            tensors += 1
            if name not in ours or name not in theirs:
                has = "the replay" if name in ours else "the checkpoint"
                raise _differs(checkpoint, name, f"{kind} {name} is in {has} alone", None)
            largest = _largest(ours[name], theirs[name])
            if largest is not None:
                raise _differs(checkpoint, name, f"{kind} {name} differs by up to {largest:.3g}", largest)
    return Agreement(step=checkpoint.progress.step, checkpoint=checkpoint.folder.name, tensors=tensors)


def _states(learner: Learner, checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """Weights as they are written, then all else that a checkpoint holds: ours, and the checkpoint's."""
    policy = learner.policy
    whole = policy.parameters if policy.adapter else learner.weights()
    weights = {name: whole[name].detach().cpu().to(policy.written_dtype).float() for name in policy.parameters}
    yield "weight", weights, policy.read(checkpoint.model)
    yield "state", learner.state(), load_file(checkpoint.folder / OPTIMIZER)


def _largest(ours: Tensor, theirs: Tensor) -> float | None:
    """The largest difference of an element; None where all bits are equal."""
    if ours.shape == theirs.shape and ours.dtype == theirs.dtype:
        bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (ours, theirs)]
        if torch.equal(*bits):
            return None
        return float((ours.double() - theirs.double()).abs().max())
    return float("inf")


def _differs(checkpoint: Checkpoint, tensor: str, what: str, largest: float | None) -> Differs:
    step = checkpoint.progress.step
    return Differs(Difference(step=step, what=what, checkpoint=checkpoint.folder.name, tensor=tensor, largest=largest))
