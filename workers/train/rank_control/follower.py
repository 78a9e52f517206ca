"""A rank that follows: it holds its shards, and does what the first rank tells it. It knows no Redis, and no files."""

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
"""The first rank's exit code is the one that tells why; it is to be read before this one's."""


def run_follower() -> int:
    """Follow until the first rank lets go. Returns the exit code: 1 where it, or another rank, was lost."""
    init_process_group()
    # From here on the first rank decides: it drains when it is asked to stop, and says when that is done.
    for received in (signal.SIGTERM, signal.SIGINT):
        signal.signal(received, signal.SIG_IGN)
    ranks = Ranks()
    structlog.contextvars.bind_contextvars(rank=ranks.rank)
    log.info("rank.joined", ranks=ranks.world_size, device=str(ranks.device))
    try:
        _run_commands(RankCommands(ranks))
    except RuntimeError as error:
        log.error("rank.lost", why=str(error))  # noqa: TRY400  (that another rank ended is no fault of this one)
        time.sleep(_EXIT_DELAY_S)
        return 1
    log.info("rank.left")
    destroy_process_group()
    return 0


def _run_commands(orders: RankCommands) -> None:
    learner: Learner | None = None
    while True:
        order = orders.receive()
        match order:
            case Shutdown():
                return
            case Heartbeat():
                orders.ranks.barrier()
            case CreateLearner():
                learner = _create_learner(order, orders)
            case _ if learner is None:
                raise RuntimeError(f"the first rank asks for {type(order).__name__} before there is a learner")
            case _:
                _execute(order, learner)


def _create_learner(order: CreateLearner, orders: RankCommands) -> Learner:
    try:
        return Learner(order.settings, dtype=getattr(torch, order.dtype))
    except PenstockError:
        orders.receive()  # the first rank has found the same: it says so, and ends
        raise


def _execute(order: TrainStep | GatherWeights | GatherState | Restore, learner: Learner) -> None:
    match order:
        case TrainStep():
            learner.step(order.batch, order.version)
        case GatherWeights():
            learner.weights()
        case GatherState():
            learner.state()
        case Restore():
            learner.load_state({}, order.names, steps=order.steps, skipped_steps=order.skipped_steps)
