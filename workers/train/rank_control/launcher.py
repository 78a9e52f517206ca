"""Starts several ranks on this machine with the agent of `torchrun`, and ends them together.

The agent starts each rank in a session of its own, which signals to this process do not reach. So each rank dies with
the agent (`stream.parent_death`), and a stop signal is forwarded to rank 0, which drains for all ranks.
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

from workers.role.exit_codes import ExitCode

log = structlog.get_logger()

_START_TIMEOUT_S: Final = 120


def launch_ranks(world_size: int, command: Sequence[str]) -> int:
    """Run a command as `world_size` ranks until all have exited or one has failed.

    When one fails, the others are asked to exit, and killed after 30 s.

    Args:
        world_size: number of ranks.
        command: of each rank, which reads its rank from the environment, as under `torchrun`.

    Returns:
        0 if all ranks exited with 0; else rank 0's exit code if it is positive; else 1.
    """
    # With its own handling of SIGTERM the agent's exit code does not depend on how the ranks exited.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    rendezvous_parameters = RendezvousParameters(
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
            rdzv_handler=rendezvous.get_rendezvous_handler(rendezvous_parameters),
            max_restarts=0,
            local_addr="localhost",
        ),
        logs_specs=DefaultLogsSpecs(),
    )

    def forward(received: int, _: FrameType | None) -> None:
        first = [worker.id for worker in agent.get_worker_group().workers if worker.global_rank == 0]
        if not first or not isinstance(first[0], int):
            raise SystemExit(0)  # no rank has started
        with suppress(ProcessLookupError):  # it has just exited
            os.kill(first[0], received)

    for received in (signal.SIGTERM, signal.SIGINT):
        signal.signal(received, forward)
    result = agent.run()
    if not result.is_failed():
        return 0
    codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    log.error("ranks.failed", codes=codes)
    first_rank = codes.get(0, 0)
    return first_rank if first_rank > 0 else ExitCode.FAILURE
