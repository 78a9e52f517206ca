"""Commands from rank 0 to the followers.

Rank 0 is the trainer: only it talks to Redis, to engines and to the disk. Before it does something in which every rank
takes part, it broadcasts a command, and all ranks do it. Between two commands it may wait hours for groups; heartbeats
show the ranks meanwhile that the others are alive.

Every rank receives the whole batch, because advantages, masks and loss weights depend on all of its completions, and
every rank computes them alike. A batch is small beside what ranks exchange in one pass.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio
import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from stream.errors import PenstockError
from workers.settings import Settings
from workers.train.ranks import Ranks, collective_timeout_s
from workers.train.step.batch import Batch

HEARTBEATS_PER_TIMEOUT: Final = 20
"""One is enough only if rank 0 is never delayed; it may be delayed by several intervals without being lost."""


class RankLostError(PenstockError):
    """A rank exited or hangs; the others cannot continue without it."""


class CreateLearner(Struct, frozen=True, tag=True):
    """Create the learner."""

    settings: Settings
    dtype: str
    """Data type of weights and optimizer state, as torch names it."""


class TrainStep(Struct, frozen=True, tag=True):
    """Train one step (`Learner.step`)."""

    batch: Batch
    version: int


class GatherWeights(Struct, frozen=True, tag=True):
    """Gather the policy's weights on rank 0."""


class GatherState(Struct, frozen=True, tag=True):
    """Gather optimizer state and everything else that the next step depends on, on rank 0."""


class Restore(Struct, frozen=True, tag=True):
    """Restore a checkpoint that rank 0 has read."""

    names: list[str]
    """Names of the checkpoint's tensors."""
    steps: int
    skipped_steps: int


class UseMicroBatchTokens(Struct, frozen=True, tag=True):
    """Set the largest number of tokens of a pass."""

    tokens: int


class Heartbeat(Struct, frozen=True, tag=True):
    """Meet at a barrier, to show that all ranks are alive."""


class Shutdown(Struct, frozen=True, tag=True):
    """Exit."""


RankCommand = (
    CreateLearner | TrainStep | GatherWeights | GatherState | Restore | UseMicroBatchTokens | Heartbeat | Shutdown
)


class RankCommands:
    """Sends commands from rank 0 and receives them on followers.

    Args:
        ranks: all ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._lock = threading.Lock()
        self._broken = False
        """A command was not completed, so the ranks may be in different collectives."""

    @contextmanager
    def broadcast(self, command: RankCommand) -> Iterator[None]:
        """Send a command to the followers; rank 0 executes it in the block. One command at a time, from any thread.

        Raises:
            RankLostError: a rank is lost, now or during an earlier command.
        """
        with self._lock:
            if self._broken:
                raise RankLostError("an earlier command to the ranks failed; the trainer has to be restarted")
            self._broken = True
            try:
                self.ranks.broadcast_bytes(_ENCODER.encode(command))
                yield
            except RuntimeError as error:
                raise RankLostError(
                    f"the {self.ranks.world_size} ranks did not complete {type(command).__name__}: {error}. Another "
                    "rank exited, or this one failed; the log lines above are of both"
                ) from error
            self._broken = False

    def receive(self) -> RankCommand:
        """Wait for the next command; on followers."""
        return _DECODER.decode(self.ranks.broadcast_bytes())

    async def send_heartbeats(self) -> None:
        """Send heartbeats forever."""
        while True:
            await anyio.sleep(collective_timeout_s() / HEARTBEATS_PER_TIMEOUT)
            await anyio.to_thread.run_sync(self._send_heartbeat)

    def shut_down(self) -> None:
        """Let the followers exit, unless they are lost."""
        if not self._broken:
            with self.broadcast(Shutdown()):
                pass

    def _send_heartbeat(self) -> None:
        with self.broadcast(Heartbeat()):
            self.ranks.barrier()


def _encode_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        content = plain.view(-1).view(torch.uint8)  # as bytes, since NumPy lacks some dtypes
        return str(plain.dtype).removeprefix("torch."), list(plain.shape), content.numpy().tobytes()
    raise TypeError(_unsupported(type(value)))


def _decode_tensor(kind: type, value: Any) -> Any:
    if kind is Tensor:
        name, shape, content = value
        dtype = getattr(torch, name)
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.view(shape)
    raise TypeError(_unsupported(kind))


def _unsupported(kind: type) -> str:
    return (
        f"a rank command holds a {kind.__module__}.{kind.__qualname__}, which cannot be sent: fields hold tensors and "
        "types that msgspec encodes; extend `_encode_tensor` and `_decode_tensor` for others"
    )


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_tensor)
_DECODER: msgspec.msgpack.Decoder[RankCommand] = msgspec.msgpack.Decoder(RankCommand, dec_hook=_decode_tensor)
