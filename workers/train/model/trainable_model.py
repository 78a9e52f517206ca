"""The model in training, whole or as an adapter: in memory, sharded over ranks, and on disk.

With activation checkpointing, layers recompute their activations in the backward pass, for less memory.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stream.errors import RunMismatchError, SettingsError
from workers.settings import Settings
from workers.train.model.adapter import Adapter, is_adapter
from workers.train.model.logprobs import LogprobModel
from workers.train.model.policy_folder import load_policy, save_policy
from workers.train.model.sharded_model import shard_model
from workers.train.ranks import Ranks, gather_full


class TrainableModel:
    """A policy whose weights, or whose adapter, are trained.

    Args:
        settings: of the run.
        folder: the model to start from.
        ranks: that share the model; all of them call the same methods in the same order.
        dtype: of the trained parameters.

    Raises:
        SettingsError: the folder holds no model, or one that cannot take the adapter.
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
        """Trained parameters by name."""

    def reference(self) -> tuple[LogprobModel, Callable[[], AbstractContextManager[object]]]:
        """Return the reference policy and the context to run it in, which disables the adapter if there is one."""
        if self.adapter is not None:
            return self.logprob_model, self.adapter.disabled
        return self._load(self.settings.model.folder, trained=False), nullcontext

    @property
    def saved_dtype(self) -> torch.dtype:
        """Dtype in which trained weights are written."""
        return torch.float32 if self.adapter else cast("torch.dtype", getattr(torch, self.settings.model.dtype))

    def weights(self, *, copy: bool = False) -> dict[str, Tensor]:
        """Return the full policy tensors as they are written, on the CPU; empty on other ranks than 0.

        Args:
            copy: no tensor shares memory with the policy.
        """
        tensors = self.adapter.merged_state() if self.adapter else self.model.state_dict(keep_vars=True)
        return gather_full(tensors, self.ranks, getattr(torch, self.settings.model.dtype), copy=copy)

    def save_policy(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the full policy in Hugging Face form to an existing folder; rank 0 only.

        Args:
            folder: target.
            weights: from `weights`.
        """
        if self.ranks.is_rank0:
            save_policy(self.model, weights, self.base, folder, self.settings.model.dtype)

    def load_trained_weights(self, folder: Path) -> dict[str, Tensor]:
        """Load trained weights from a folder, by the names and in the dtype of `parameters`.

        Raises:
            RunMismatchError: they belong to another model, or one of the two runs trains an adapter and the other does
                not.
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


def checkpoint_layers(model: Any) -> None:
    """Wrap the forward pass of each layer in `torch.utils.checkpoint`.

    The layers are those that transformers marks for it. The switch of transformers itself works only in training mode,
    which would turn dropout on; models here stay in evaluation mode. Hooks of the layers, such as FSDP's, stay outside.

    Raises:
        SettingsError: the model has no such layers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise SettingsError(
            f"train.gradient_checkpointing is set, but {type(model).__name__} has no layers that can be "
            "recomputed; leave it out"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
