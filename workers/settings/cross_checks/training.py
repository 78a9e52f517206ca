"""Checks of `[train]` and `[lora]`."""

from collections.abc import Iterator

from workers.settings.settings import Settings


def check_trainer(s: Settings) -> Iterator[str]:
    """`[train]`: the attention kernel supports the model's type."""
    if s.train.attention in {"flash_attention_2", "flash_attention_3"} and s.model.dtype == "float32":
        yield (
            f"train.attention = {s.train.attention!r} supports half precision only, but model.dtype is 'float32'; set "
            "the second to 'bfloat16', or the first to 'auto', 'sdpa' or 'varlen'"
        )


def check_lora(s: Settings) -> Iterator[str]:
    """`[lora]`: the adapter has a rank and layers."""
    if not s.lora.rank:
        for key in s.lora.non_default():
            yield f"lora.{key} is set, but lora.rank is 0, so there is no adapter; set it too, or leave it out"
        return
    if not s.lora.target_modules:
        yield "lora.target_modules is empty, so lora.rank has no effect; leave it out for every linear layer"
    if "all-linear" in s.lora.target_modules and len(s.lora.target_modules) > 1:
        yield "lora.target_modules has names beside 'all-linear', which includes them; leave out one or the other"
