"""What is trained of the model, and in which type."""

from collections.abc import Iterator

from workers.settings.settings import Settings


def check_trainer(s: Settings) -> Iterator[str]:
    """`[train]`: what the model's type allows."""
    if s.train.attention in {"flash_attention_2", "flash_attention_3"} and s.model.dtype == "float32":
        yield (
            f"train.attention = {s.train.attention!r} works in half precision alone, but model.dtype is 'float32'; set "
            "the second to 'bfloat16', or the first to 'auto', 'sdpa' or 'varlen'"
        )


def check_lora(s: Settings) -> Iterator[str]:
    """`[lora]`: that there is an adapter, and how engines are given it."""
    if not s.lora.rank:
        for key in s.lora.non_default():
            yield f"lora.{key} is set, but lora.rank is 0, so there is no adapter; set it too, or leave it out"
        return
    if not s.lora.targets:
        yield "lora.targets is empty, so lora.rank has nothing to act on; leave it out for every linear layer"
    if "all-linear" in s.lora.targets and len(s.lora.targets) > 1:
        yield "lora.targets has names beside 'all-linear', which has them all; leave out one or the other"
    if s.lora.publish == "adapter":
        for key in s.weights.non_default("transport", "kv", "host", "port"):
            yield (
                f"weights.{key} is set, but with lora.publish = 'adapter' engines read adapters as files, and "
                "requests under way keep theirs; leave the first out, or set the second to 'merged'"
            )
