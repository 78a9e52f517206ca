"""A rank that follows: it holds its shards, and does what the first rank tells it. It knows no Redis, and no files."""

import signal
import time
from typing import Final

import structlog
import torch

from stream.errors import PenstockError
from workers.train.ranks.orders import Beat, Begin, End, Orders, PutBack, State, Step, Weights
from workers.train.ranks.ranks import Ranks, meet, part
from workers.train.step.learner import Learner

log = structlog.get_logger()

_AFTER_YOU_S: Final = 1.0
"""The first rank's exit code is the one that tells why; it is to be read before this one's."""


def follow() -> int:
    """Follow until the first rank lets go. Returns the exit code: 1 where it, or another rank, was lost."""
    meet()
    # From here on the first rank decides: it drains when it is asked to stop, and says when that is done.
    for received in (signal.SIGTERM, signal.SIGINT):
        signal.signal(received, signal.SIG_IGN)
    ranks = Ranks()
    structlog.contextvars.bind_contextvars(rank=ranks.rank)
    log.info("rank.followed", ranks=ranks.size, device=str(ranks.device))
    try:
        _obey(Orders(ranks))
    except RuntimeError as error:
        log.error("rank.lost", why=str(error))  # noqa: TRY400  (that another rank ended is no fault of this one)
        time.sleep(_AFTER_YOU_S)
        return 1
    log.info("rank.left")
    part()
    return 0


def _obey(orders: Orders) -> None:
    learner: Learner | None = None
    while True:
        order = orders.hear()
        match order:
            case End():
                return
            case Beat():
                orders.ranks.answer()
            case Begin():
                learner = _begun(order, orders)
            case _ if learner is None:
                raise RuntimeError(f"the first rank asks for {type(order).__name__} before there is a learner")
            case _:
                _carry_out(order, learner)


def _begun(order: Begin, orders: Orders) -> Learner:
    try:
        return Learner(order.settings, dtype=getattr(torch, order.dtype))
    except PenstockError:
        orders.hear()  # the first rank has found the same: it says so, and ends
        raise


def _carry_out(order: Step | Weights | State | PutBack, learner: Learner) -> None:
    match order:
        case Step():
            learner.step(order.batch, order.version, filtered=order.filtered, dropped=order.dropped)
        case Weights():
            learner.weights()
        case State():
            learner.state()
        case PutBack():
            learner.put_back({}, order.names, steps=order.steps, skipped_steps=order.skipped_steps)
