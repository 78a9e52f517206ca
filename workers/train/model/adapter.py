"""LoRA: an adapter in a model, which alone is trained, while the weights of the model stay as they are.

The layers are peft's, put into the model in place: to everybody who reads it, it is the model that it was. On disk an
adapter is a folder in peft's form, which `peft.PeftModel.from_pretrained` and vLLM load.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stream.errors import RunMismatchError, SettingsError
from workers.settings import Lora
from workers.train.distributed.sharding import full_tensor, shard_like
from workers.train.model.policy_folder import load_policy, save_policy

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_NAME: Final = "default"
"""The adapter's name within the model, which is not part of the names in its file."""
_PREFIX: Final = "base_model.model."
"""Of the names in peft's files."""
_DIGEST_ELEMENTS: Final = 64
"""Elements of each weight that the base model is known by."""


class Adapter:
    """The adapter in a model.

    Its parameters are float32 (float64 beside such weights), and whole at every rank, whatever the weights beside them
    are. An untrained adapter adds exactly nothing.

    Args:
        model: a Hugging Face causal language model; its own weights are frozen, and may be in shards: then all ranks
            make their adapter together.
        base: the folder that it was loaded from.
        lora: rank, alpha, targets.
        seed: of the first of the two matrices; the second begins at 0.

    Raises:
        SettingsError: peft is not installed, or the model has no such layers.
    """

    def __init__(self, model: Any, base: Path, lora: Lora, seed: int) -> None:
        self.model = model
        self.base = base
        self._digest = _digest(model)
        self._config = _inject(model, base, lora)
        self._layers = [model.get_submodule(name) for name in self._config.target_modules]
        self.parameters: dict[str, torch.nn.Parameter] = {}
        """By their names in peft's file."""
        dtype = torch.promote_types(model.dtype, torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(requires_grad=f".{_NAME}." in name)
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
                self.parameters[_PREFIX + name.replace(f".{_NAME}.", ".")] = parameter
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.parameters.items():
            if "lora_A" in name:
                drawn = torch.empty(parameter.shape)  # float32, so that a seed means the same in every type
                torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                parameter.data.copy_(drawn)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Meanwhile the model is without it: the policy of the beginning. No gradient may be asked of that."""
        for layer in self._layers:
            layer.enable_adapters(enabled=False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(enabled=True)

    def merged_state(self) -> dict[str, Tensor]:
        """Weights of an ordinary model that says the same, by its names, in shards if they are so here.

        Those without an adapter are not copied.
        """
        state = self.model.state_dict(keep_vars=True)
        found = {}
        with torch.no_grad():
            for name, value in state.items():
                if f".{_NAME}." in name:
                    continue
                place, is_layer, rest = name.partition(".base_layer.")
                if is_layer and rest == "weight":
                    delta = self.model.get_submodule(place).get_delta_weight(_NAME)
                    value = (value.to(delta.dtype) + shard_like(delta, value)).to(value.dtype)  # noqa: PLW2901
                found[f"{place}.{rest}" if is_layer else name] = value
        return found

    def save(self, folder: Path, dtype_name: str) -> None:
        """Write the adapter in peft's form into an existing folder.

        Args:
            folder: where.
            dtype_name: in which the model is written when it is merged; the adapter itself is float32.
        """
        self._config.save_pretrained(folder)
        tensors = {name: p.detach().to("cpu", torch.float32).contiguous() for name, p in self.parameters.items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt", "base": self._digest, "dtype": dtype_name})

    def load(self, folder: Path) -> dict[str, Tensor]:
        """What `write` wrote, by name.

        Raises:
            RunMismatchError: there is no adapter, or a damaged one; it is of another shape or scale, or was trained
                beside other weights.
        """
        if not (folder / WEIGHTS).is_file():
            raise RunMismatchError(
                f"{folder}: there is no adapter, but lora.rank is set: it was written by a run that trained the whole "
                "model; use another run name"
            )
        alpha = _config(folder)["lora_alpha"]
        if alpha != self._config.lora_alpha:
            raise RunMismatchError(
                f"{folder}: the adapter was trained with lora.alpha = {alpha:g}, not {self._config.lora_alpha:g}, and "
                "would be another policy with it; put it back, or use another run name"
            )
        with _open_safetensors(folder / WEIGHTS) as file:
            if file.metadata().get("base") != self._digest:
                raise RunMismatchError(
                    f"{folder}: the adapter was trained beside other weights than those in {self.base} (or in another "
                    "model.dtype); put them back, or use another run name"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
        if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise RunMismatchError(
                f"{folder}: the adapter has other layers, or another rank, than [lora] says; put [lora] back, or use "
                "another run name"
            )
        return tensors


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter in place of a model."""
    return (folder / CONFIG).is_file()


def merge_adapter(folder: Path, out: Path) -> None:
    """Write the adapter in a folder and the model that it was trained beside as one ordinary model.

    Args:
        folder: as `Adapter.save` wrote it.
        out: an existing folder.

    Raises:
        SettingsError: the base model is not where it was.
        RunMismatchError: it is another one now, or the adapter is damaged.
    """
    config = _config(folder)
    with _open_safetensors(folder / WEIGHTS) as file:
        dtype_name = file.metadata()["dtype"]
    base = Path(config["base_model_name_or_path"])
    if not (base / "config.json").is_file():
        raise SettingsError(f"{folder}: the adapter was trained beside {base}, which is gone; put it back there")
    lora = Lora(rank=config["r"], alpha=config["lora_alpha"], target_modules=tuple(config["target_modules"]))
    adapter = Adapter(load_policy(base, getattr(torch, dtype_name)), base, lora, seed=0)
    with torch.no_grad():
        for name, tensor in adapter.load(folder).items():
            adapter.parameters[name].copy_(tensor)
    save_policy(adapter.model, adapter.merged_state(), base, out, dtype_name)


def _config(folder: Path) -> dict[str, Any]:
    """What peft's file says of the adapter in a folder."""
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise RunMismatchError(f"{folder / CONFIG}: cannot be read: {error}; take another checkpoint") from error


@contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
    """A file of safetensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise RunMismatchError(f"{file}: cannot be read: {error}; take another checkpoint") from error


def _inject(model: Any, base: Path, lora: Lora) -> Any:
    """Put peft's layers into the model; returns peft's description of them."""
    try:
        import peft
    except ImportError as error:
        raise SettingsError("lora.rank is set, which needs peft: pip install 'penstock[lora]'") from error
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    names = {name: module for name, module in model.named_modules() if name}
    for target in lora.target_modules:
        if target == "all-linear":
            continue
        meant = [name for name in names if name == target or name.endswith(f".{target}")]
        if not meant:
            fit = {n.rpartition(".")[2] for n, m in names.items() if isinstance(m, torch.nn.Linear) and m not in ends}
            raise SettingsError(f"lora.target_modules: {base} has no layer {target!r}; it has {', '.join(sorted(fit))}")
        if any(names[name] in ends for name in meant):
            raise SettingsError(
                f"lora.target_modules: {target!r} is the model's embedding or output layer, which get no adapter; leave it out"
            )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules="all-linear" if "all-linear" in lora.target_modules else list(lora.target_modules),
        lora_dropout=0.0,  # a policy with dropout is not the one that the engine samples from
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base.absolute()),
        inference_mode=False,
    )
    try:
        peft.inject_adapter_in_model(config, model, _NAME)
    except ValueError as error:
        raise SettingsError(f"lora.target_modules on {base}: {error}") from error
    config.target_modules = sorted(
        name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)
    )
    return config


def _digest(model: Any) -> str:
    """What a model's weights are known by: names, shapes, and some elements of each."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        flat = full_tensor(parameter.detach()).flatten()
        some = flat[:: max(1, len(flat) // _DIGEST_ELEMENTS)].float().cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()
