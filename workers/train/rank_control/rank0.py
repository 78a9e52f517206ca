"""Rank 0, the trainer, broadcasts each command of its learner to the followers before it executes it.

A follower holds its shards and executes rank 0's commands. It uses neither Redis nor files.
"""

import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

import anyio
import structlog
import torch
from torch import Tensor

from stream.errors import PenstockError
from stream.validity import DropReason
from workers.role.context import WorkerContext
from workers.settings import Settings
from workers.train.rank_control.commands import (
    CreateLearner,
    GatherState,
    GatherWeights,
    Heartbeat,
    RankCommands,
    Restore,
    Shutdown,
    TrainStep,
    UseMicroBatchTokens,
)
from workers.train.ranks import Ranks, destroy_process_group, init_process_group
from workers.train.step.batch import Batch
from workers.train.step.group_checks import GroupRewards
from workers.train.step.learner import Learner
from workers.train.step.step_metrics import StepReport
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

    def use_micro_batch_tokens(self, tokens: int) -> None:
        """Set the largest number of tokens of a pass on all ranks."""
        with self._commands.broadcast(UseMicroBatchTokens(tokens)):
            super().use_micro_batch_tokens(tokens)

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


_EXIT_DELAY_S: Final = 1.0
"""Rank 0's exit code carries the cause, so rank 0 should exit first."""


def run_follower() -> int:
    """Execute commands until `Shutdown`. Returns the exit code: 0, or 1 if a rank was lost."""
    init_process_group()
    # On a stop signal rank 0 drains and then sends `Shutdown`.
    for received in (signal.SIGTERM, signal.SIGINT):
        signal.signal(received, signal.SIG_IGN)
    ranks = Ranks()
    structlog.contextvars.bind_contextvars(rank=ranks.rank)
    log.info("rank.joined", ranks=ranks.world_size, device=str(ranks.device))
    try:
        _run_commands(RankCommands(ranks))
    except RuntimeError as error:
        log.error("rank.lost", why=str(error))  # noqa: TRY400  (another rank's exit needs no traceback here)
        time.sleep(_EXIT_DELAY_S)
        return 1
    log.info("rank.left")
    destroy_process_group()
    return 0


def _run_commands(commands: RankCommands) -> None:
    learner: Learner | None = None
    while True:
        command = commands.receive()
        match command:
            case Shutdown():
                return
            case Heartbeat():
                commands.ranks.barrier()
            case CreateLearner():
                learner = _create_learner(command, commands)
            case _ if learner is None:
                raise RuntimeError(f"rank 0 sent {type(command).__name__} before CreateLearner")
            case _:
                _execute(command, learner)


def _create_learner(command: CreateLearner, commands: RankCommands) -> Learner:
    try:
        return Learner(command.settings, dtype=getattr(torch, command.dtype))
    except PenstockError:
        commands.receive()  # rank 0 fails with the same error, reports it and shuts down
        raise


def _execute(
    command: TrainStep | GatherWeights | GatherState | Restore | UseMicroBatchTokens, learner: Learner
) -> None:
    match command:
        case TrainStep():
            learner.step(command.batch, command.version)
        case UseMicroBatchTokens():
            learner.use_micro_batch_tokens(command.tokens)
        case GatherWeights():
            learner.weights()
        case GatherState():
            learner.state()
        case Restore():
            learner.load_state({}, command.names, steps=command.steps, skipped_steps=command.skipped_steps)
