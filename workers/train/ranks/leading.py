"""The first of several ranks: the trainer as it is alone, with a learner that takes the others along."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import anyio
import structlog
import torch
from torch import Tensor

from stream.validity import DropReason
from workers.role import Role
from workers.settings import Settings
from workers.train.ranks.orders import Begin, Orders, PutBack, State, Step, Weights
from workers.train.ranks.ranks import Ranks, meet, part
from workers.train.step.batch import Batch
from workers.train.step.learner import Learner
from workers.train.step.report import StepReport
from workers.train.worker import train

log = structlog.get_logger()

T = TypeVar("T")


class LeadingLearner(Learner):
    """A learner that tells the other ranks of everything in which they take part, before it does it.

    Args:
        settings: of the run.
        orders: the way to the others.
        dtype: of weights and optimizer state.
    """

    def __init__(self, settings: Settings, orders: Orders, dtype: torch.dtype = torch.float32) -> None:
        self._orders = orders
        with orders.told(Begin(settings, str(dtype).removeprefix("torch."))):
            super().__init__(settings, dtype=dtype)

    def step(
        self,
        batch: Batch,
        version: int,
        *,
        filtered: Batch | None = None,
        dropped: Mapping[DropReason, int] | None = None,
    ) -> StepReport:
        """Train on one batch, every rank on a part of it."""
        with self._orders.told(Step(batch, version, filtered, dict(dropped or {}))):
            return super().step(batch, version, filtered=filtered, dropped=dropped)

    def weights(self) -> dict[str, Tensor]:
        """Gather the policy here."""
        with self._orders.told(Weights()):
            return super().weights()

    def state(self) -> dict[str, Tensor]:
        """Gather here what the next step depends on beside it."""
        with self._orders.told(State()):
            return super().state()

    def put_back(
        self, tensors: Mapping[str, Tensor], names: Sequence[str], *, steps: int, skipped_steps: int = 0
    ) -> None:
        """Give every rank its part of what a checkpoint holds."""
        with self._orders.told(PutBack(list(names), steps, skipped_steps)):
            super().put_back(tensors, names, steps=steps, skipped_steps=skipped_steps)


async def lead(role: Role) -> None:
    """Be the trainer, and take the other ranks along; they leave when it does.

    Raises:
        RankLostError: one of them ended. They all have to be started again, and go on from the checkpoint.
    """
    await together(lambda orders: train(role, make_learner=lambda settings: LeadingLearner(settings, orders)))


async def together(do: Callable[[Orders], Awaitable[T]]) -> T:
    """Do something as the first rank, while the others follow; they leave when it is done.

    Args:
        do: is given the way to them.

    Raises:
        RankLostError: one of them ended.
    """
    await anyio.to_thread.run_sync(meet)
    try:
        orders = Orders(Ranks())
        log.info("ranks.met", ranks=orders.ranks.size, device=str(orders.ranks.device))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(orders.beat)
                done = await do(orders)
                tasks.cancel_scope.cancel()
            return done
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(orders.end)
    finally:
        part()
