"""Several ranks on this machine, started by the agent of `torchrun` and ended together.

The agent gives each rank a session of its own, which no signal to ours reaches: so a rank dies with the agent
(`stream.parent_death`), and a request to stop is passed on to the first rank, which drains for all of them.
"""

import os
import signal
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Final

import structlog
import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters

log = structlog.get_logger()

_FAILED: Final = 1
_START_TIMEOUT_S: Final = 120


def launch_ranks(world_size: int, command: Sequence[str]) -> int:
    """Run a command as so many ranks, until all of them have left or one has failed.

    When one fails the others are asked to end, and killed after half a minute.

    Args:
        world_size: number of ranks.
        command: of each; tells its rank from the environment, as under `torchrun`.

    Returns:
        0 where all left in peace; else what the first rank said, if it said anything; else 1.
    """
    # The agent's own way with SIGTERM ends in an exit code that says nothing of how the ranks ended.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
        timeout=_START_TIMEOUT_S,
    )
    agent = LocalElasticAgent(
        WorkerSpec(
            role="train",
            local_world_size=world_size,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=rendezvous.get_rendezvous_handler(meeting),
            max_restarts=0,
            local_addr="localhost",
        ),
        logs_specs=DefaultLogsSpecs(),
    )

    def pass_on(received: int, _: FrameType | None) -> None:
        first = [worker.id for worker in agent.get_worker_group().workers if worker.global_rank == 0]
        if not first or not isinstance(first[0], int):
            raise SystemExit(0)  # nothing had begun
        with suppress(ProcessLookupError):  # it has just ended, which the agent is about to see
            os.kill(first[0], received)

    for received in (signal.SIGTERM, signal.SIGINT):
        signal.signal(received, pass_on)
    result = agent.run()
    if not result.is_failed():
        return 0
    codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    log.error("ranks.failed", codes=codes)
    first_rank = codes.get(0, 0)
    return first_rank if first_rank > 0 else _FAILED
