"""Norms of small models that keep the precision of float64."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


def exact_norms(replace: Callable[[type, str, Callable[..., Tensor]], None] = setattr) -> None:
    """Let norms of float64 models compute in float64; the norms of transformers compute in float32 for every dtype.

    Args:
        replace: sets an attribute, such as `MonkeyPatch.setattr`.
    """
    for norm in (Qwen3RMSNorm, MistralRMSNorm):
        replace(norm, "forward", _in_float64_too(norm.forward))


def _in_float64_too(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def exact(self, x):  # type: ignore[no-untyped-def]
        if x.dtype != torch.float64:
            return forward(self, x)
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    return exact
