"""The first of several ranks: the trainer as it is alone, with a learner that takes the others along."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import anyio
import structlog
import torch
from torch import Tensor

from stream.validity import DropReason
from workers.runtime.context import WorkerContext
from workers.settings import Settings
from workers.train.distributed.ranks import Ranks, destroy_process_group, init_process_group
from workers.train.rank_control.commands import (
    CreateLearner,
    GatherState,
    GatherWeights,
    RankCommands,
    Restore,
    TrainStep,
)
from workers.train.step.batch import Batch
from workers.train.step.group_checks import GroupRewards
from workers.train.step.learner import Learner
from workers.train.step.metrics import StepReport
from workers.train.worker import train

log = structlog.get_logger()

T = TypeVar("T")


class Rank0Learner(Learner):
    """A learner that tells the other ranks of everything in which they take part, before it does it.

    Args:
        settings: of the run.
        commands: the way to the others.
        dtype: of weights and optimizer state.
    """

    def __init__(self, settings: Settings, commands: RankCommands, dtype: torch.dtype = torch.float32) -> None:
        self._commands = commands
        with commands.broadcast(CreateLearner(settings, str(dtype).removeprefix("torch."))):
            super().__init__(settings, dtype=dtype)

    def step(
        self,
        batch: Batch,
        version: int,
        *,
        filtered: Sequence[GroupRewards] = (),
        dropped: Mapping[DropReason, int] | None = None,
    ) -> StepReport:
        """Train on one batch, every rank on a part of it."""
        with self._commands.broadcast(TrainStep(batch, version)):
            return super().step(batch, version, filtered=filtered, dropped=dropped)

    def weights(self) -> dict[str, Tensor]:
        """Gather the policy here."""
        with self._commands.broadcast(GatherWeights()):
            return super().weights()

    def state(self) -> dict[str, Tensor]:
        """Gather here what the next step depends on beside it."""
        with self._commands.broadcast(GatherState()):
            return super().state()

    def load_state(
        self, tensors: Mapping[str, Tensor], names: Sequence[str], *, steps: int, skipped_steps: int = 0
    ) -> None:
        """Give every rank its part of what a checkpoint holds."""
        with self._commands.broadcast(Restore(list(names), steps, skipped_steps)):
            super().load_state(tensors, names, steps=steps, skipped_steps=skipped_steps)


async def train_as_rank0(context: WorkerContext) -> None:
    """Be the trainer, and take the other ranks along; they leave when it does.

    Raises:
        RankLostError: one of them ended. They all have to be started again, and go on from the checkpoint.
    """
    await run_with_followers(
        lambda orders: train(context, make_learner=lambda settings: Rank0Learner(settings, orders))
    )


async def run_with_followers(do: Callable[[RankCommands], Awaitable[T]]) -> T:
    """Do something as the first rank, while the others follow; they leave when it is done.

    Args:
        do: is given the way to them.

    Raises:
        RankLostError: one of them ended.
    """
    await anyio.to_thread.run_sync(init_process_group)
    try:
        orders = RankCommands(Ranks())
        log.info("ranks.connected", ranks=orders.ranks.world_size, device=str(orders.ranks.device))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(orders.send_heartbeats)
                done = await do(orders)
                tasks.cancel_scope.cancel()
            return done
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(orders.shut_down)
    finally:
        destroy_process_group()
