"""Whole weights from GPU to GPU, by vLLM's own NCCL trainer side. Unverified: never run on a GPU.

Each engine forms a process group with the trainer as rank 0, so an engine that restarts or is added affects no other.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import anyio
import anyio.to_thread
import structlog
import torch
from anyio.from_thread import BlockingPortal
from safetensors import safe_open

from stream.errors import EngineError, SettingsError
from workers.engine_api.http_connections import free_port
from workers.train.publishing.engine_control import EngineControlClient, PartialUpdateError

log = structlog.get_logger()

_SUPPORTED_VLLM = "0.32"
"""The vLLM version whose trainer API this code uses."""


class NcclTransfer:
    """Broadcasts with vLLM's NCCL transfer engine. A `Transfer` and a context manager.

    Args:
        host: name or address at which engines reach this machine.

    Raises:
        SettingsError: there is no GPU, or no vLLM with a trainer API in this environment.
    """

    backend: ClassVar[str] = "nccl"
    start_hint: ClassVar[str] = ""

    def __init__(self, host: str) -> None:
        if not torch.cuda.is_available():
            raise SettingsError(
                'weights.transport = "nccl" needs a GPU in the trainer, and torch sees none; take "files" or "http"'
            )
        try:
            from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise SettingsError(
                f'weights.transport = "nccl" needs vLLM {_SUPPORTED_VLLM} in the trainer\'s own environment: {error}; '
                'install it there, or take "files" or "http"'
            ) from error
        log.warning("weights.unverified", transport="nccl", why="never run on GPUs yet; compare log-probs first")
        self._host = host
        self._factory, self._info = WeightTransferTrainerFactory, NCCLTrainerInitInfo
        self._groups: dict[str, Any] = {}
        self._lock = anyio.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for url in list(self._groups):
            self._close_group(url)

    async def prepare(self, path: Path) -> None:
        """Nothing to do: the files are in place."""

    async def transfer(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """Broadcast the weights to the engine's workers; see `Transfer`."""
        async with self._lock:
            if await engine.weight_version() is None:  # the engine restarted: its side of the group is gone
                await anyio.to_thread.run_sync(self._close_group, engine.url)
            try:
                await self._send(engine, path, version)
            except EngineError as error:
                await anyio.to_thread.run_sync(self._close_group, engine.url)
                raise PartialUpdateError(f"{engine.url}: nccl: {error}") from error
            except Exception as error:  # NCCL and vLLM raise errors of any type
                await anyio.to_thread.run_sync(self._close_group, engine.url)
                raise PartialUpdateError(f"{engine.url}: nccl: {error!r}") from error

    async def _send(self, engine: EngineControlClient, path: Path, version: int) -> None:
        source = await anyio.to_thread.run_sync(_FolderSource, path)
        workers = await engine.world_size()
        async with BlockingPortal() as portal:
            client = _VllmClient(portal, engine, version)
            with anyio.fail_after(engine.update_timeout_s):
                if engine.url not in self._groups:
                    info = self._info(
                        rank=0, master_address=self._host, master_port=free_port(""), world_size=1 + workers
                    )
                    join = partial(self._factory.trainer_init, info, client=client, source=source)
                    self._groups[engine.url] = await anyio.to_thread.run_sync(join, abandon_on_cancel=True)
                group = self._groups[engine.url]
                group.client, group.source = client, source
                await anyio.to_thread.run_sync(group.send_weights, abandon_on_cancel=True)

    def _close_group(self, url: str) -> None:
        group = self._groups.pop(url, None)
        if group is not None:
            group.shutdown()


class _VllmClient:
    """The client that vLLM's trainer side calls from its threads (its protocol `VLLMWeightSyncClient`)."""

    def __init__(self, portal: BlockingPortal, engine: EngineControlClient, version: int) -> None:
        self._portal = portal
        self._engine = engine
        self._version = version

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._portal.call(self._engine.init_transfer, init_info)

    def start_weight_update(self) -> None:
        self._portal.call(self._engine.start_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._portal.call(self._engine.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002  (vLLM passes none)
        self._portal.call(self._engine.finish_update, self._version)


class _FolderSource:
    """A folder's tensors, loaded to the GPU one by one (vLLM's protocol `WeightSource`)."""

    def __init__(self, folder: Path) -> None:
        from vllm.distributed.weight_transfer import ParamMeta

        self._files = sorted(folder.glob("*.safetensors"))
        self._metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors("cpu")]

    def metadata(self) -> list[Any]:
        """Return names, dtypes and shapes, in the order of iteration."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors("cuda")

    def _tensors(self, device: str) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self._files:
            with safe_open(file, framework="pt", device=device) as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not iterable)
                    yield name, tensors.get_tensor(name)
