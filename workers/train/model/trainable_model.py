"""The model that is trained: all of it, or an adapter in it; in memory, in shards where ranks share it, and on disk."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stream.errors import RunMismatchError
from workers.settings import Settings
from workers.train.distributed.ranks import Ranks
from workers.train.distributed.sharding import gather_full
from workers.train.model.activation_checkpointing import checkpoint_layers
from workers.train.model.adapter import Adapter, is_adapter
from workers.train.model.logprobs import LogprobModel
from workers.train.model.policy_folder import load_policy, save_policy
from workers.train.model.sharded_model import shard_model


class TrainableModel:
    """A policy that is trained.

    Args:
        settings: of the run.
        folder: the model to begin with.
        ranks: that share it; all of them call the same methods in the same order.
        dtype: of what is trained.

    Raises:
        SettingsError: there is no model in the folder, or none that an adapter could be put into.
    """

    def __init__(self, settings: Settings, folder: Path, ranks: Ranks, dtype: torch.dtype) -> None:
        self.settings, self.base, self.ranks, self.dtype = settings, folder, ranks, dtype
        self.logprob_model = self._load(folder, trained=not settings.lora.rank)
        self.model: Any = self.logprob_model.model
        self.adapter = Adapter(self.model, folder, settings.lora, settings.run.seed) if settings.lora.rank else None
        if settings.train.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.parameters: dict[str, torch.nn.Parameter] = (
            self.adapter.parameters if self.adapter else dict(self.model.named_parameters())
        )
        """Of what is trained, by name."""

    def reference(self) -> tuple[LogprobModel, Callable[[], AbstractContextManager[object]]]:
        """The policy of the beginning, and what makes it so for a pass: that an adapter is switched off."""
        if self.adapter is not None:
            return self.logprob_model, self.adapter.disabled
        return self._load(Path(self.settings.model.path), trained=False), nullcontext

    @property
    def saved_dtype(self) -> torch.dtype:
        """In which `write` writes what is trained."""
        return torch.float32 if self.adapter else cast("torch.dtype", getattr(torch, self.settings.model.dtype))

    def weights(self) -> dict[str, Tensor]:
        """The whole policy's tensors, as they are written, on the CPU; at other ranks than the first, nothing."""
        tensors = self.adapter.merged_state() if self.adapter else self.model.state_dict(keep_vars=True)
        return gather_full(tensors, self.ranks, getattr(torch, self.settings.model.dtype))

    def save_policy(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the whole policy in Hugging Face form into an existing folder; at the first rank.

        Args:
            folder: where.
            weights: as `weights` gave them.
        """
        if self.ranks.is_rank0:
            save_policy(self.model, weights, self.base, folder, self.settings.model.dtype)

    def load_trained_weights(self, folder: Path) -> dict[str, Tensor]:
        """What was trained and written there, by the names of `parameters`, in the type that they have here.

        Raises:
            RunMismatchError: it belongs to another model, or to a run with an adapter where there is none, or without.
        """
        if self.adapter is not None:
            return self.adapter.load(folder)
        if is_adapter(folder):
            raise RunMismatchError(
                f"{folder}: an adapter alone was trained there, but lora.rank is 0; put [lora] back, or use another "
                "run name"
            )
        weights = {name: parameter.data for name, parameter in load_policy(folder, self.dtype).named_parameters()}
        if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise RunMismatchError(f"{folder}: its weights are not those of {self.base}; use another run name")
        return weights

    def _load(self, folder: Path, *, trained: bool) -> LogprobModel:
        mixed = self.settings.model.dtype == "bfloat16"
        dtype = torch.bfloat16 if mixed and self.settings.lora.rank else self.dtype
        whole = load_policy(folder, dtype).requires_grad_(trained) if self.ranks.is_rank0 else None
        return shard_model(whole, self.ranks, mixed=mixed)
