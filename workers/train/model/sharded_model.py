"""A model sharded over ranks: FSDP2 over its layers, and over everything else as one more group.

The weights of a layer are gathered when it runs, forward and backward, and released after it. Those of the last group,
which holds embeddings and output layer, stay gathered while `ShardedRoot.forward` runs, because log-probs are computed
from the output layer's weight outside the model's forward pass. Tied embeddings are both in that group, so they stay
one parameter. Gradients are summed over ranks, not averaged, because a loss is a sum of shares.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from workers.train.model.lm_head import LMHead, find_lm_head
from workers.train.model.logit_blocks import LogitTransform
from workers.train.model.logprobs import LogprobModel
from workers.train.ranks import Ranks, broadcast_into


class ShardedRoot(nn.Module):
    """Root module of a sharded model; its forward pass calls a given function while the root's weights are gathered.

    Args:
        model: the model whose weights are gathered.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function with these arguments."""
        return function(*args, **kwargs)


def shard_model(whole: Any, ranks: Ranks, *, mixed: bool) -> LogprobModel:
    """Shard a model over the ranks; with a single rank, move it to its device.

    Args:
        whole: the full model on rank 0's CPU; other ranks may pass None. Parameters keep their `requires_grad`.
        ranks: that share the model.
        mixed: True for passes in bfloat16 with gradients summed in float32.
    """
    if ranks.mesh is None:
        return LogprobModel.from_whole(whole.to(ranks.device))
    model, transform = _empty_copy(whole, ranks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    root = ShardedRoot(model)
    for module in [*_layer_modules(model), root]:
        # The last group is resharded after forward too: a pass without gradient has no backward pass to do it.
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy or MixedPrecisionPolicy(), reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)  # gloo supports no other
            module.set_reduce_scatter_unused_params(True, recurse=False)  # experts without a token on this rank
    root.to_empty(device=ranks.device)
    source = {**dict(whole.named_parameters()), **dict(whole.named_buffers())} if ranks.is_rank0 else {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        broadcast_into(tensor, source.get(name), ranks)
    head = None if transform is None else LMHead(model.get_output_embeddings(), transform)
    return LogprobModel(model, head, sharded_root=root)


def _layer_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that Transformers declares unsplittable: the layers."""
    names = getattr(model, "_no_split_modules", None) or ()
    return (module for module in model.modules() if type(module).__name__ in names)


def _empty_copy(whole: Any, ranks: Ranks) -> tuple[Any, LogitTransform | None]:
    """Return a model without weights from rank 0's description, and its logit transform if that is known."""
    import transformers

    description = _describe(whole) if ranks.is_rank0 else {}
    received = msgspec.json.decode(ranks.broadcast_bytes(msgspec.json.encode(description)))
    config = transformers.AutoConfig.for_model(**received["config"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, received["dtype"]), attn_implementation=received["attention"]
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(received["trained"][name])
    if ranks.is_rank0:  # it writes the model, including its end-of-turn tokens
        model.generation_config = whole.generation_config
    transform = received["transform"]
    return model.eval(), None if transform is None else LogitTransform(**transform)


def _describe(whole: Any) -> dict[str, Any]:
    head = find_lm_head(whole)
    return {
        "transform": None if head is None else head.transform._asdict(),
        "config": msgspec.json.decode(whole.config.to_json_string(use_diff=False)),
        "dtype": str(whole.dtype).removeprefix("torch."),
        "attention": getattr(whole.config, "_attn_implementation", None),
        "trained": {name: parameter.requires_grad for name, parameter in whole.named_parameters()},
    }
