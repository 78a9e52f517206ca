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
from stream.validity import DropReason
from workers.settings import Settings
from workers.train.ranks.ranks import Ranks, patience_s
from workers.train.step.batch import Batch

BEATS: Final = 20
"""Within the time after which the first rank is given up: it may be held up for much longer than one of them."""


class RankLostError(PenstockError):
    """A rank ended, or hangs: the others cannot go on without it."""


class Begin(Struct, frozen=True, tag=True):
    """Make the learner."""

    settings: Settings
    dtype: str
    """Of weights and optimizer state."""


class Step(Struct, frozen=True, tag=True):
    """Take one step (`Learner.step`)."""

    batch: Batch
    version: int
    filtered: Batch | None
    dropped: dict[DropReason, int]


class Weights(Struct, frozen=True, tag=True):
    """Gather the policy at the first rank."""


class State(Struct, frozen=True, tag=True):
    """Gather everything else that the next step depends on."""


class PutBack(Struct, frozen=True, tag=True):
    """Go back to what a checkpoint holds."""

    names: list[str]
    """Of the tensors that the first rank has."""
    steps: int
    skipped_steps: int


class Beat(Struct, frozen=True, tag=True):
    """Do nothing: the first rank is there."""


class End(Struct, frozen=True, tag=True):
    """Leave."""


Order = Begin | Step | Weights | State | PutBack | Beat | End


class Orders:
    """The way from the first rank to the others.

    Args:
        ranks: all of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._lock = threading.Lock()
        self._broken = False

    @contextmanager
    def told(self, order: Order) -> Iterator[None]:
        """Tell the others, and do the same within the block. One order at a time, from whichever thread.

        Raises:
            RankLostError: they are not there any more.
        """
        with self._lock:
            if self._broken:
                raise RankLostError("the ranks have lost one another; the trainer has to be started again")
            self._broken = True  # until it was carried out: what ended half way cannot be followed by another order
            try:
                self.ranks.tell(_ENCODER.encode(order))
                yield
            except RuntimeError as error:
                raise RankLostError(
                    f"the {self.ranks.size} ranks could not carry out {type(order).__name__} together: {error}. "
                    "Another rank ended, or this one failed; what each of them said is above"
                ) from error
            self._broken = False

    def hear(self) -> Order:
        """The next order; at the other ranks."""
        return _DECODER.decode(self.ranks.tell())

    async def beat(self) -> None:
        """Tell the others now and then that this rank is there, and see that they are, for ever."""
        while True:
            await anyio.sleep(patience_s() / BEATS)
            await anyio.to_thread.run_sync(self._beat)

    def end(self) -> None:
        """Let the others leave, if they can still be told."""
        if not self._broken:
            with self.told(End()):
                pass

    def _beat(self) -> None:
        with self.told(Beat()):
            self.ranks.answer()


def _encoded(value: Any) -> Any:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        content = plain.view(-1).view(torch.uint8)  # as bytes: NumPy does not know every dtype
        return str(plain.dtype).removeprefix("torch."), list(plain.shape), content.numpy().tobytes()
    raise TypeError(_no_part_of_an_order(type(value)))


def _decoded(kind: type, value: Any) -> Any:
    if kind is Tensor:
        name, shape, content = value
        dtype = getattr(torch, name)
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.view(shape)
    raise TypeError(_no_part_of_an_order(kind))


def _no_part_of_an_order(kind: type) -> str:
    return (
        f"an order to the ranks holds a {kind.__module__}.{kind.__qualname__}: beside what msgspec encodes only "
        "tensors are sent; have its field hold one of those, or teach `_encoded` and `_decoded` the type"
    )


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
_DECODER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order, dec_hook=_decoded)
