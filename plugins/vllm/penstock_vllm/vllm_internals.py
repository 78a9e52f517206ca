"""Finds the internal functions of vLLM that the backend needs when a server starts, before any update."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from penstock_vllm import TESTED_VLLM_VERSION

_RELOAD = "vllm.model_executor.model_loader.reload"
_CPU = "vllm.model_executor.layers.utils"


class VllmInternals(NamedTuple):
    """Internal functions of vLLM."""

    initialize: Callable[..., Any]
    """`(model)`: restores the layout in which parameters are loaded; each layer is processed again once all its
    parameters are loaded."""
    finalize: Callable[..., Any]
    """`(model, model_config)`: restores the old values of parameters that were not loaded."""
    pack_for_cpu: Callable[..., Any]
    """`(module, remove_weight)`: packs a linear layer's weight for the CPU kernels."""


def find_internals() -> VllmInternals:
    """Import all functions.

    Raises:
        RuntimeError: one does not exist; names it, the installed version of vLLM, and the version that works.
    """
    return VllmInternals(
        _find(_RELOAD, "initialize_layerwise_reload"),
        _find(_RELOAD, "finalize_layerwise_reload"),
        _find(_CPU, "dispatch_cpu_unquantized_gemm"),
    )


def _find(module: str, name: str) -> Callable[..., Any]:
    try:
        result: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"penstock-vllm needs {module}.{name}, which vLLM {_version()} does not have; known to work: vLLM "
            f"{TESTED_VLLM_VERSION}. Take that version, or weights over nccl or LoRA adapters, which need no plugin"
        ) from error
    return result


def _version() -> str:
    try:
        return str(import_module("vllm").__version__)
    except (ImportError, AttributeError):
        return "of unknown version"
