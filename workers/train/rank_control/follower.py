"""A follower: holds its shards and executes rank 0's commands. It uses neither Redis nor files."""

import signal
import time
from typing import Final

import structlog
import torch

from stream.errors import PenstockError
from workers.train.distributed.ranks import Ranks, destroy_process_group, init_process_group
from workers.train.rank_control.commands import (
    CreateLearner,
    GatherState,
    GatherWeights,
    Heartbeat,
    RankCommands,
    Restore,
    Shutdown,
    TrainStep,
)
from workers.train.step.learner import Learner

log = structlog.get_logger()

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


def _execute(command: TrainStep | GatherWeights | GatherState | Restore, learner: Learner) -> None:
    match command:
        case TrainStep():
            learner.step(command.batch, command.version)
        case GatherWeights():
            learner.weights()
        case GatherState():
            learner.state()
        case Restore():
            learner.load_state({}, command.names, steps=command.steps, skipped_steps=command.skipped_steps)
