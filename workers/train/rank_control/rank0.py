"""Rank 0: the trainer, with a learner that broadcasts each command to the followers before it executes it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import anyio
import structlog
import torch
from torch import Tensor

from stream.validity import DropReason
from workers.role.context import WorkerContext
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
    """A learner whose operations run on all ranks.

    Args:
        settings: of the run.
        commands: the connection to the followers.
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
        """Train on one batch; each rank computes some of its micro-batches."""
        with self._commands.broadcast(TrainStep(batch, version)):
            return super().step(batch, version, filtered=filtered, dropped=dropped)

    def weights(self, *, copy: bool = False) -> dict[str, Tensor]:
        """Gather the policy's weights here."""
        with self._commands.broadcast(GatherWeights()):
            return super().weights(copy=copy)

    def state(self) -> dict[str, Tensor]:
        """Gather here everything else that the next step depends on."""
        with self._commands.broadcast(GatherState()):
            return super().state()

    def load_state(
        self, tensors: Mapping[str, Tensor], names: Sequence[str], *, steps: int, skipped_steps: int = 0
    ) -> None:
        """Load a checkpoint's tensors, each rank its shards."""
        with self._commands.broadcast(Restore(list(names), steps, skipped_steps)):
            super().load_state(tensors, names, steps=steps, skipped_steps=skipped_steps)


async def train_as_rank0(context: WorkerContext) -> None:
    """Run the trainer as rank 0; the followers exit with it.

    Raises:
        RankLostError: a rank was lost. All ranks must be restarted; they resume from the checkpoint.
    """
    await run_with_followers(
        lambda commands: train(context, make_learner=lambda settings: Rank0Learner(settings, commands))
    )


async def run_with_followers(main: Callable[[RankCommands], Awaitable[T]]) -> T:
    """Run `main` as rank 0, then let the followers exit.

    Args:
        main: receives the connection to the followers.

    Raises:
        RankLostError: a rank was lost.
    """
    await anyio.to_thread.run_sync(init_process_group)
    try:
        commands = RankCommands(Ranks())
        log.info("ranks.connected", ranks=commands.ranks.world_size, device=str(commands.ranks.device))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(commands.send_heartbeats)
                result = await main(commands)
                tasks.cancel_scope.cancel()
            return result
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(commands.shut_down)
    finally:
        destroy_process_group()
