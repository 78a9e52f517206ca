"""Less memory for a third more time: layers that keep nothing for the backward pass but what entered them."""

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from stream.errors import SettingsError


def checkpoint_layers(model: Any) -> None:
    """Have each layer compute its forward pass again when its gradient is needed.

    The layers are those that transformers would choose. Its own switch acts in training mode alone, which turns dropout
    on; here models stay in evaluation mode. Hooks of the layers (FSDP's, which gather weights) stay outside.

    Raises:
        SettingsError: the model has no such layers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise SettingsError(
            f"train.gradient_checkpointing is set, but {type(model).__name__} has no layers that can be computed "
            "again; leave it out"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
