"""The internal parts of vLLM that the backend rests on; looked for when a server starts, not when it updates."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from penstock_vllm import TESTED_VLLM_VERSION

_RELOAD = "vllm.model_executor.model_loader.reload"
_CPU = "vllm.model_executor.layers.utils"


class VllmInternals(NamedTuple):
    """What vLLM has to have."""

    initialize: Callable[..., Any]
    """`(model)`: parameters go back to the form in which checkpoints are loaded; each layer is made ready again once it
    is complete."""
    finalize: Callable[..., Any]
    """`(model, model_config)`: what was not loaded gets its old values back."""
    pack_for_cpu: Callable[..., Any]
    """`(module, remove_weight)`: copies a linear layer's weight into the form that CPU kernels read."""


def find_internals() -> VllmInternals:
    """Look for all of them.

    Raises:
        RuntimeError: names what is missing, this vLLM and the version that is known to work.
    """
    return VllmInternals(
        _find(_RELOAD, "initialize_layerwise_reload"),
        _find(_RELOAD, "finalize_layerwise_reload"),
        _find(_CPU, "dispatch_cpu_unquantized_gemm"),
    )


def _find(module: str, name: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"penstock-vllm needs {module}.{name}, which vLLM {_version()} does not have; known to work: vLLM "
            f"{TESTED_VLLM_VERSION}. Take that version, or weights over nccl or LoRA adapters, which need no plugin"
        ) from error
    return found


def _version() -> str:
    try:
        return str(import_module("vllm").__version__)
    except (ImportError, AttributeError):
        return "of unknown version"
