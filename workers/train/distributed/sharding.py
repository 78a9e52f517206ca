"""A model in shards, one on each rank: FSDP2 over its layers, and over everything else as one more group.

A layer's weights are put together when it runs, forward and backward, and let go after it. Those of the other group,
embeddings and output layer among them, are together for as long as `Within.forward` runs, for log-probs are made from
the output layer's weight behind the model's back. Tied embeddings are both in that group, so they stay one parameter.
Gradients are added up over ranks, not averaged, for a loss is a sum of shares.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from workers.train.distributed.ranks import Ranks
from workers.train.model.lm_head import LMHead, find_lm_head
from workers.train.model.logit_blocks import LogitTransform
from workers.train.model.logprobs import LogprobModel


class ShardedRoot(nn.Module):
    """A module whose forward pass is whatever is called within it.

    Args:
        model: whose weights are whole meanwhile.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return function(*args, **kwargs)


def shard_model(whole: Any, ranks: Ranks, *, mixed: bool) -> LogprobModel:
    """A model to be read: in shards where there are several ranks, as it is where there is one.

    Args:
        whole: the model on the first rank, on its CPU; nobody looks at it elsewhere. Parameters that want no gradient
            there want none here.
        ranks: that share it.
        mixed: passes are made in bfloat16; gradients are added up in float32.
    """
    if ranks.mesh is None:
        return LogprobModel.from_whole(whole.to(ranks.device))
    model, finish = _empty_copy(whole, ranks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    within = ShardedRoot(model)
    for module in [*_layer_modules(model), within]:
        # The last group too is let go after a forward pass: a pass without gradient has no backward that would.
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy or MixedPrecisionPolicy(), reshard_after_forward=True)
    for module in within.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)  # gloo knows no other
            module.set_reduce_scatter_unused_params(True, recurse=False)  # an expert that no token of this rank chose
    within.to_empty(device=ranks.device)
    given = {**dict(whole.named_parameters()), **dict(whole.named_buffers())} if ranks.is_rank0 else {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        broadcast_into(tensor, given.get(name), ranks)
    head = None if finish is None else LMHead(model.get_output_embeddings(), finish)
    return LogprobModel(model, head, sharded_root=within)


def broadcast_into(target: Tensor, source: Tensor | None, ranks: Ranks) -> None:
    """Set a tensor, sharded or whole at every rank, to what the first rank has.

    Args:
        target: at every rank.
        source: of the same shape, at the first rank alone.
        ranks: all of them call this.
    """
    with torch.no_grad():
        if isinstance(target, DTensor):
            given = torch.empty(target.shape, dtype=target.dtype) if source is None else source.detach()
            given = given.to(ranks.device, target.dtype)
            target.to_local().copy_(distribute_tensor(given, target.device_mesh, target.placements).to_local())
            return
        if source is not None:
            target.copy_(source)
        if ranks.world_size > 1:
            dist.broadcast(target.detach(), 0)


def gather_full(tensors: Mapping[str, Tensor], ranks: Ranks, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Whole tensors on the first rank's CPU; nothing on the others.

    One after another, so that no device ever holds more than one whole tensor beside its shards. What is the same
    tensor under two names is so afterwards.

    Args:
        tensors: by name; the same names in the same order at every rank.
        ranks: all of them call this.
        dtype: of the result's floating-point tensors; as they are, unless given.
    """
    memo: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in memo:
            detached = tensor.detach()
            whole = detached.full_tensor() if isinstance(detached, DTensor) else detached
            to = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
            memo[id(tensor)] = whole.to(to).cpu() if ranks.is_rank0 else whole.new_empty(0)
    return {name: memo[id(tensor)] for name, tensor in tensors.items()} if ranks.is_rank0 else {}


def clip_grad_norm(parameters: Iterable[nn.Parameter], bound: float) -> Tensor:
    """Scale gradients so that their norm, over all shards, is at most this; returns what it was, everywhere alike."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, bound)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _layer_modules(model: nn.Module) -> Iterator[nn.Module]:
    """What Transformers says must not be split over devices: the layers."""
    names = getattr(model, "_no_split_modules", None) or ()
    return (module for module in model.modules() if type(module).__name__ in names)


def _empty_copy(whole: Any, ranks: Ranks) -> tuple[Any, LogitTransform | None]:
    """A model without weights, of the first rank's description, and what its head does to logits, if that is known."""
    import transformers

    description = _describe(whole) if ranks.is_rank0 else {}
    described = msgspec.json.decode(ranks.broadcast_bytes(msgspec.json.encode(description)))
    config = transformers.AutoConfig.for_model(**described["config"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, described["dtype"]), attn_implementation=described["attention"]
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(described["trained"][name])
    if ranks.is_rank0:  # which writes the model, and with it what ends a turn
        model.generation_config = whole.generation_config
    finish = described["finish"]
    return model.eval(), None if finish is None else LogitTransform(**finish)


def _describe(whole: Any) -> dict[str, Any]:
    head = find_lm_head(whole)
    return {
        "finish": None if head is None else head.transform._asdict(),
        "config": msgspec.json.decode(whole.config.to_json_string(use_diff=False)),
        "dtype": str(whole.dtype).removeprefix("torch."),
        "attention": getattr(whole.config, "_attn_implementation", None),
        "trained": {name: parameter.requires_grad for name, parameter in whole.named_parameters()},
    }
