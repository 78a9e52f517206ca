"""What the first rank tells the others to do, and how they hear of it.

Rank 0 is the trainer: it alone speaks to Redis, to engines and to the disk. Whenever it is about to do something in
which every rank takes part, it says so, and all of them do it. Between two orders it may wait for groups for hours;
a beat now and then tells the others that it is still there, and tells it the same of them.

A batch goes to all ranks as it is: what is decided of it (advantages, masks, how much of the loss each token is) hangs
on all of its completions, and is decided by everybody alike. It is small beside what the ranks exchange in one pass.
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
from workers.train.distributed.ranks import Ranks, collective_timeout_s
from workers.train.step.batch import Batch

HEARTBEATS_PER_TIMEOUT: Final = 20
"""Within the time after which the first rank is given up: it may be held up for much longer than one of them."""


class RankLostError(PenstockError):
    """A rank ended, or hangs: the others cannot go on without it."""


class CreateLearner(Struct, frozen=True, tag=True):
    """Make the learner."""

    settings: Settings
    dtype: str
    """Of weights and optimizer state."""


class TrainStep(Struct, frozen=True, tag=True):
    """Take one step (`Learner.step`)."""

    batch: Batch
    version: int


class GatherWeights(Struct, frozen=True, tag=True):
    """Gather the policy at the first rank."""


class GatherState(Struct, frozen=True, tag=True):
    """Gather everything else that the next step depends on."""


class Restore(Struct, frozen=True, tag=True):
    """Go back to what a checkpoint holds."""

    names: list[str]
    """Of the tensors that the first rank has."""
    steps: int
    skipped_steps: int


class Heartbeat(Struct, frozen=True, tag=True):
    """Do nothing: the first rank is there."""


class Shutdown(Struct, frozen=True, tag=True):
    """Leave."""


RankCommand = CreateLearner | TrainStep | GatherWeights | GatherState | Restore | Heartbeat | Shutdown


class RankCommands:
    """The way from the first rank to the others.

    Args:
        ranks: all of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._lock = threading.Lock()
        self._broken = False

    @contextmanager
    def broadcast(self, order: RankCommand) -> Iterator[None]:
        """Tell the others, and do the same within the block. One order at a time, from whichever thread.

        Raises:
            RankLostError: they are not there any more.
        """
        with self._lock:
            if self._broken:
                raise RankLostError("the ranks have lost one another; the trainer has to be started again")
            self._broken = True  # until it was carried out: what ended half way cannot be followed by another order
            try:
                self.ranks.broadcast_bytes(_ENCODER.encode(order))
                yield
            except RuntimeError as error:
                raise RankLostError(
                    f"the {self.ranks.world_size} ranks could not carry out {type(order).__name__} together: {error}. "
                    "Another rank ended, or this one failed; what each of them said is above"
                ) from error
            self._broken = False

    def receive(self) -> RankCommand:
        """The next order; at the other ranks."""
        return _DECODER.decode(self.ranks.broadcast_bytes())

    async def send_heartbeats(self) -> None:
        """Tell the others now and then that this rank is there, and see that they are, for ever."""
        while True:
            await anyio.sleep(collective_timeout_s() / HEARTBEATS_PER_TIMEOUT)
            await anyio.to_thread.run_sync(self._send_heartbeat)

    def shut_down(self) -> None:
        """Let the others leave, if they can still be told."""
        if not self._broken:
            with self.broadcast(Shutdown()):
                pass

    def _send_heartbeat(self) -> None:
        with self.broadcast(Heartbeat()):
            self.ranks.barrier()


def _encode_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        content = plain.view(-1).view(torch.uint8)  # as bytes: NumPy does not know every dtype
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
        f"an order to the ranks holds a {kind.__module__}.{kind.__qualname__}: beside what msgspec encodes only "
        "tensors are sent; have its field hold one of those, or teach `_encode_tensor` and `_decoded` the type"
    )


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_tensor)
_DECODER: msgspec.msgpack.Decoder[RankCommand] = msgspec.msgpack.Decoder(RankCommand, dec_hook=_decode_tensor)
