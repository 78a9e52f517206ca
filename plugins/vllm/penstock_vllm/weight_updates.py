"""The backend: stages and checks an update without touching the model, then loads it in the last step.

::

    start_weight_update     clears what an earlier update staged
    update_weights          finds or downloads the files, checks names and shapes; the model is untouched
    finish_weight_update    all workers agree; loads through the model's own loaders, which shard; packs for CPU kernels

When a worker raises, the answers of the workers after it stay in vLLM's queues and are mistaken for answers to the next
call. So no worker raises before `finish_weight_update`, and there only the last one does, on behalf of all.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from penstock_vllm.errors import BROKEN, FailedError, RefusedError, UpdateError
from penstock_vllm.tensor_probe import tensor_probe
from penstock_vllm.vllm_internals import find_internals
from penstock_vllm.weight_download import download
from penstock_vllm.weight_files import Shapes, check_update, find_files, iter_tensors, read_shapes

logger = init_logger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: files need no connection between trainer and workers."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Location of the new weights: `path`, or `url` with `files`."""

    path: str | None = None
    """Model folder in Hugging Face format, or a safetensors file, that every worker can read."""
    url: str | None = None
    """URL of a folder, ending in a slash; every worker downloads from it."""
    files: list[dict[str, Any]] | None = None
    """`name`, `size` in bytes and `sha256` of each file under `url`."""


class CheckpointTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The backend of one worker; vLLM creates it when the model is loaded."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._internals = find_internals()
        self._reference = _reference(vllm_config)
        self._staged: list[Path] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._problem = "nothing was sent"

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: files need no connection."""

    def start_weight_update(self) -> None:
        """Discard whatever an unfinished update staged."""
        self._reset("nothing was sent")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Find or download the files and check them; `finish_weight_update` reports any problem."""
        self._reset("")
        try:
            self._staged = self._stage(update_info)
        except UpdateError as error:
            self._reset(str(error))
        except Exception as error:  # noqa: BLE001  (no exception may escape, see the module's docstring)
            self._reset(str(FailedError(repr(error))))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage an update like vLLM's own method, except that `finish_weight_update` reports info that is malformed."""
        try:
            typed = self.parse_update_info(update_info)
        except ValueError as error:
            self._reset(str(RefusedError(str(error))))
            return
        self.receive_weights(typed)

    def finish_weight_update(self) -> None:
        """Load the staged files into the model if every worker staged them.

        Raises:
            RuntimeError: on the last worker, if any worker failed; says why, and whether the old weights are intact.
        """
        if problem := self._first_problem(self._problem):
            self._raise_for_all(problem)
            return
        try:
            with torch.no_grad():
                self._load()
            problem = ""
        except Exception as error:  # a model's loader may raise anything
            logger.exception("new weights failed half-way")
            problem = f"{BROKEN}: {error!r} while the new weights were loaded; send complete weights before resuming"
        self._reset("nothing was sent")
        if problem := self._first_problem(problem):
            self._raise_for_all(problem)

    def shutdown(self) -> None:
        """Delete downloaded files."""
        self._reset("the server is shutting down")

    def _stage(self, info: UpdateInfo) -> list[Path]:
        if (info.path is None) == (info.url is None) or (info.url is None) != (info.files is None):
            raise RefusedError("an update has a path, or a url with files")
        if info.url is not None:
            self._folder = download(info.url, info.files or [])
        files = find_files(Path(info.path if self._folder is None else self._folder.name))
        update = read_shapes(files)
        if self._reference is not None:
            with tensor_probe(self.model) as takes:
                check_update(update, self._reference, takes)
        return files

    def _load(self) -> None:
        self._internals.initialize(self.model)
        try:
            self.model.load_weights(iter_tensors(self._staged))
        finally:
            self._internals.finalize(self.model, self.model_config)
        for module in self.model.modules():
            # On CPU, a tied `lm_head` keeps a packed copy of the weight that it shares; loading does not refresh it.
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.dim() == 2:
                self._internals.pack_for_cpu(module, remove_weight=False)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _first_problem(self, problem: str) -> str:
        """Gather the problems of all workers and return the first; empty if there is none."""
        if self.parallel_config.world_size == 1:
            return problem
        from vllm.distributed.parallel_state import get_world_group

        group = get_world_group().cpu_group
        problems: list[str] = [""] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(problems, problem, group=group)
        return next((f"worker {rank}: {result}" for rank, result in enumerate(problems) if result), "")

    def _raise_for_all(self, problem: str) -> None:
        if self.parallel_config.rank == self.parallel_config.world_size - 1:
            raise RuntimeError(problem)

    def _reset(self, problem: str) -> None:
        self._staged, self._problem = [], problem
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _reference(vllm_config: Any) -> Shapes | None:
    """Return the shapes of the checkpoint that the server started with; None without readable safetensors files."""
    name = vllm_config.model_config.model
    try:
        folder = Path(name)
        if not folder.exists():
            from huggingface_hub import snapshot_download

            cached = snapshot_download(
                name,
                revision=vllm_config.model_config.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
            folder = Path(cached)
        return read_shapes(find_files(folder))
    except (UpdateError, OSError, ValueError) as error:
        logger.warning(
            "names and shapes of new weights will not be checked, since those that %s was started with are not in "
            "safetensors files here: %s",
            name,
            error,
        )
        return None
