"""The choice of `train.micro_batch_tokens`: what fits into the memory of the device that a model was loaded onto."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import structlog
import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed.tensor import DTensor

from stream.errors import SettingsError
from stream.wording import format_bytes
from workers.role.memory import BUDGET, PassMemory, read_memory
from workers.role.watchdogs import resident_bytes
from workers.settings import Settings
from workers.train.model.pass_memory import UnmeasurableModelError, measure_model
from workers.train.ranks import Ranks
from workers.train.step.memory_plan import (
    MAX_TOKENS,
    MIN_TOKENS,
    ModelShape,
    TrainerMemory,
    rough_passes,
    with_heap_gaps,
)

log = structlog.get_logger()

_UNKNOWN_MODEL_TOKENS: Final = 2048
"""Chosen for a model that is neither of a known architecture nor can be measured."""


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """Memory of one rank's device, in bytes."""

    budget: float
    """What this process may hold."""
    held: float
    """What it holds now, with its model loaded."""
    source: str
    """What limits it, in words."""


class MicroBatchChoice(Struct, frozen=True, kw_only=True):
    """The tokens of a pass that were chosen, and why."""

    tokens: int
    text: str
    plan: TrainerMemory | None = None
    """None: passes of this model could not be measured."""
    budget: float = 0.0

    def allows(self, tokens: int) -> bool:
        """Return whether this number of tokens fits, without the room that a choice leaves free."""
        return self.plan is None or self.plan.peak(tokens) <= self.budget


def device_memory(ranks: Ranks) -> DeviceMemory:
    """Return the memory of this rank's device."""
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        held = torch.cuda.memory_reserved(ranks.device)
        return DeviceMemory(budget=free + held, held=held, source=f"(of {format_bytes(total)} on the GPU)")
    held, given = resident_bytes(), os.environ.get(BUDGET, "")
    if given:
        budget, _, source = given.partition(" ")
        return DeviceMemory(budget=int(budget) / ranks.world_size, held=held, source=source)
    memory = read_memory()
    return DeviceMemory(budget=memory.available / ranks.world_size + held, held=held, source=f"({memory.source})")


def plan_loaded(
    settings: Settings,
    tensors: Iterable[Tensor],
    trained: Iterable[Tensor],
    passes: PassMemory,
    ranks: Ranks,
) -> TrainerMemory:
    """Return what this rank needs, with its model loaded: figures of its tensors and of its process.

    Args:
        settings: of the run.
        tensors: all weights on this rank, including a reference policy and a critic.
        trained: the weights among these that get gradients.
        passes: memory of its passes.
        ranks: that share the model.
    """
    weights, held = _bytes_of(tensors), device_memory(ranks).held
    copies = 0.0
    if ranks.is_rank0 and ranks.device.type != "cuda" and not settings.publishes_adapters:
        is_narrowed = settings.model.dtype == "bfloat16" and not settings.lora.rank
        has_second = settings.algorithm.kl_coefficient > 0 and not settings.lora.rank
        copies = weights * (1.0 if is_narrowed else 2.0) / (2.0 if has_second else 1.0)
    return TrainerMemory(
        process=held - weights,
        weights=weights,
        optimizer=3.0 * _bytes_of(trained),
        copies=copies,
        passes=passes if ranks.device.type == "cuda" else with_heap_gaps(settings, passes),
        longest=settings.max_model_len,
    )


def choose_micro_batch(
    settings: Settings, plan: Callable[[PassMemory], TrainerMemory], ranks: Ranks, *, shares: bool
) -> MicroBatchChoice:
    """Choose the tokens of a pass for the model that is loaded; all ranks call this, and choose the same.

    Args:
        settings: of the run.
        plan: `plan_loaded` for the memory of passes.
        ranks: that share the model.
        shares: rows may run as the prefix tree that they share.

    Raises:
        SettingsError: not even a small pass fits.
    """
    device, folder = device_memory(ranks), Path(settings.model.path)
    shape = ModelShape.read(folder)
    bound = None if shape is None else rough_passes(settings, shape)
    found = None if bound is None else plan(bound)
    if found is None or found.choose_tokens(device.budget) < MAX_TOKENS:
        try:
            found = plan(measure_model(settings, folder, shares=shares).passes)
        except UnmeasurableModelError as error:
            log.warning("memory.unmeasured", why=str(error))
            found = None
    tokens = _UNKNOWN_MODEL_TOKENS if found is None else found.choose_tokens(device.budget)
    _, maxima = ranks.all_reduce_metrics({}, {"smaller": -float(tokens)})
    tokens = -int(maxima["smaller"])
    if found is None:
        return MicroBatchChoice(tokens=tokens, text=f"micro_batch_tokens = {tokens:,}: this model cannot be measured")
    memory = f"{format_bytes(device.budget)} of memory {device.source}"
    if not tokens:
        needed = format_bytes(found.peak(MIN_TOKENS))
        raise SettingsError(
            f"the trainer needs {needed} for passes over {MIN_TOKENS} tokens ({found.describe()}), and has {memory}; "
            "`penstock check` says which setting helps"
        )
    text = f"micro_batch_tokens = {tokens:,} chosen: {found.describe()}, {memory}"
    return MicroBatchChoice(tokens=tokens, text=text, plan=found, budget=device.budget)


def _bytes_of(tensors: Iterable[Tensor]) -> float:
    """Return the bytes of tensors on this rank; one that occurs twice counts once."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return float(sum({each.data_ptr(): each.nbytes for each in local}.values()))
