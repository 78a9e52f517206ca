"""LoRA: an adapter in a model, trained while the base weights stay frozen.

The layers are peft's, injected in place, so the model keeps its interface. On disk an adapter is a folder in peft's
format, which `peft.PeftModel.from_pretrained` and vLLM load.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stream.errors import RunMismatchError, SettingsError
from workers.local_engine.base_weights import ADAPTER_FILE, BASE, NAME_PREFIX, SCALE, weights_digest
from workers.settings import LoraSettings
from workers.train.model.policy_folder import load_policy, save_policy
from workers.train.ranks import full_tensor, shard_like

CONFIG: Final = "adapter_config.json"
_NAME: Final = "default"
"""Name of the adapter inside the model; the file leaves it out of tensor names."""


class Adapter:
    """The LoRA adapter of a model.

    Its parameters are float32 (float64 for a float64 model) and replicated on every rank, even if the base weights are
    sharded or bfloat16. An untrained adapter changes nothing.

    Args:
        model: a Hugging Face causal language model; its weights are frozen. If they are sharded, all ranks create their
            adapter together.
        base: the folder that the model was loaded from.
        lora: rank, alpha, target modules.
        seed: of the first of the two matrices; the second starts at 0.

    Raises:
        SettingsError: peft is not installed, or the model lacks the target modules.
    """

    def __init__(self, model: Any, base: Path, lora: LoraSettings, seed: int) -> None:
        self.model = model
        self.base = base
        self._digest = weights_digest((name, full_tensor(value.detach())) for name, value in model.named_parameters())
        self._config = _inject(model, base, lora)
        self._layers = [model.get_submodule(name) for name in self._config.target_modules]
        self.parameters: dict[str, torch.nn.Parameter] = {}
        """Parameters by their names in peft's file."""
        for name, parameter in _train_adapter_alone(model):
            self.parameters[NAME_PREFIX + name.replace(f".{_NAME}.", ".")] = parameter
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.parameters.items():
            if "lora_A" in name:
                initial = torch.empty(parameter.shape)  # float32, so a seed gives the same values in every dtype
                torch.nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator)
                parameter.data.copy_(initial)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapter in a block, which gives the initial policy; compute no gradients inside."""
        for layer in self._layers:
            layer.enable_adapters(enabled=False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(enabled=True)

    def merged_state(self) -> dict[str, Tensor]:
        """Return the weights of an equivalent model without adapter, by its names, sharded as they are here.

        Weights without an adapter are not copied.
        """
        state = self.model.state_dict(keep_vars=True)
        merged = {}
        with torch.no_grad():
            for name, value in state.items():
                if f".{_NAME}." in name:
                    continue
                place, is_layer, rest = name.partition(".base_layer.")
                if is_layer and rest == "weight":
                    delta = self.model.get_submodule(place).get_delta_weight(_NAME)
                    value = (value.to(delta.dtype) + shard_like(delta, value)).to(value.dtype)  # noqa: PLW2901
                merged[f"{place}.{rest}" if is_layer else name] = value
        return merged

    def copy_tensors(self) -> dict[str, Tensor]:
        """Return a copy of the adapter's tensors, by name, on the CPU."""
        return {
            name: parameter.detach().to("cpu", torch.float32, copy=True).contiguous()
            for name, parameter in self.parameters.items()
        }

    def save(self, folder: Path, dtype_name: str, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter in peft's format to an existing folder.

        Args:
            folder: target.
            dtype_name: dtype of the merged model, should it be written; the adapter itself is float32.
            tensors: an earlier result of `copy_tensors`; by default the adapter as it is now.
        """
        self._config.save_pretrained(folder)
        written = dict(tensors or self.copy_tensors())
        scale = repr(self._config.lora_alpha / self._config.r)
        metadata = {"format": "pt", BASE: self._digest, SCALE: scale, "dtype": dtype_name}
        save_file(written, folder / ADAPTER_FILE, metadata)

    def load(self, folder: Path) -> dict[str, Tensor]:
        """Load an adapter's tensors, by name.

        Raises:
            RunMismatchError: the folder holds no adapter or a damaged one, or one with another shape, scale or base
                model.
        """
        if not (folder / ADAPTER_FILE).is_file():
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
        with _open_safetensors(folder / ADAPTER_FILE) as file:
            if file.metadata().get(BASE) != self._digest:
                raise RunMismatchError(
                    f"{folder}: the adapter was trained with other base weights than those in {self.base} (or with "
                    "another "
                    "model.dtype); put them back, or use another run name"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
        if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise RunMismatchError(
                f"{folder}: the adapter has other layers, or another rank, than [lora] says; put [lora] back, or use "
                "another run name"
            )
        return tensors


def is_adapter(folder: Path) -> bool:
    """Return whether the folder holds an adapter instead of a model."""
    return (folder / CONFIG).is_file()


def merge_adapter(folder: Path, out: Path) -> None:
    """Merge an adapter into its base model, and write the result as an ordinary model.

    Args:
        folder: the adapter, from `Adapter.save`.
        out: existing target folder.

    Raises:
        SettingsError: the base model is gone.
        RunMismatchError: the base model has changed, or the adapter is damaged.
    """
    config = _config(folder)
    with _open_safetensors(folder / ADAPTER_FILE) as file:
        dtype_name = file.metadata()["dtype"]
    base = Path(config["base_model_name_or_path"])
    if not (base / "config.json").is_file():
        raise SettingsError(f"{folder}: the adapter's base model {base} is gone; put it back")
    lora = LoraSettings(rank=config["r"], alpha=config["lora_alpha"], target_modules=tuple(config["target_modules"]))
    adapter = Adapter(load_policy(base, getattr(torch, dtype_name)), base, lora, seed=0)
    with torch.no_grad():
        for name, tensor in adapter.load(folder).items():
            adapter.parameters[name].copy_(tensor)
    save_policy(adapter.model, adapter.merged_state(), base, out, dtype_name)


def _config(folder: Path) -> dict[str, Any]:
    """Read peft's description of the adapter in a folder."""
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise RunMismatchError(f"{folder / CONFIG}: cannot be read: {error}; take another checkpoint") from error


@contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise RunMismatchError(f"{file}: cannot be read: {error}; take another checkpoint") from error


def inject_adapter(model: Any, base: Path, lora: LoraSettings) -> None:
    """Give a model an adapter whose matrices are not initialized; its other parameters are frozen."""
    _inject(model, base, lora)
    for _ in _train_adapter_alone(model):
        pass


def _train_adapter_alone(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Freeze all parameters but the adapter's, which become float32 or wider; yield these."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(requires_grad=f".{_NAME}." in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
            yield name, parameter


def _inject(model: Any, base: Path, lora: LoraSettings) -> Any:
    """Inject peft's layers into the model; return peft's description of them."""
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
                f"lora.target_modules: {target!r} is the model's embedding or output layer, which get no adapter; "
                "leave it out"
            )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules="all-linear" if "all-linear" in lora.target_modules else list(lora.target_modules),
        lora_dropout=0.0,  # with dropout the policy would differ from the one that the engine samples from
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
