"""Activation checkpointing: layers recompute their activations in the backward pass, for less memory."""

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from stream.errors import SettingsError


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
