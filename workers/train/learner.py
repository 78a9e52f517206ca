"""Model and optimizer: one batch in, one step done, and weights to write. Knows nothing of streams."""

import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import structlog
import torch
from torch import Tensor

from stream.errors import RunMismatchError, SettingsError
from stream.validity import DropReason
from workers.settings import Settings
from workers.train.advantages import ESTIMATORS
from workers.train.batch import Batch, split
from workers.train.durable import new_folder
from workers.train.logprobs import token_logprobs
from workers.train.losses import LOSSES, LossOutput
from workers.train.masks import Masks, too_old
from workers.train.metrics import Metrics, step_metrics
from workers.train.schedule import factor
from workers.train.selection import derive_masks

log = structlog.get_logger()

COMPANIONS: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "*processor_config.json",
)
"""Files beside the weights that are copied from the base model's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What became of one batch."""

    trained: bool
    """The optimizer moved, at least once."""
    skipped: str
    """Why not, or why it stopped before its last update: `no_valid_row`, `gradient_not_finite`; else empty."""
    loss: float
    """Mean over loss tokens and updates; 0.0 where nothing was valid; may be NaN where the step was skipped."""
    metrics: Metrics
    """By the names in `workers.train.metrics.NAMES`."""


@dataclass(slots=True, eq=False)
class _Work:
    """One batch on its way through the updates."""

    batch: Batch
    masks: Masks
    advantages_R: Tensor
    parts: list[Tensor]
    proximal_RT: Tensor
    denominator: int
    updates: int = 0
    """Updates that were computed, finite or not."""
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def count(self, output: LossOutput) -> None:
        """Add the share of one micro-batch."""
        self.add("loss", float(output.loss.detach()) * self.denominator)
        for name, value in output.sums.items():
            self.add(name, float(value))
        for name, value in output.maxima.items():
            self.maxima[name] = max(float(value), self.maxima.get(name, float("-inf")))

    def add(self, name: str, value: float) -> None:
        """Add to a sum over loss tokens, or over updates."""
        self.sums[name] = self.sums.get(name, 0.0) + value

    def metrics(self) -> Metrics:
        """Means over loss tokens and updates; entropy is known of the first update alone."""
        per_update = {"grad_norm": 1, "entropy": self.denominator / max(1, self.updates)}
        means = {n: s / (self.updates * per_update.get(n, self.denominator)) for n, s in self.sums.items()}
        return {**means, **self.maxima}


class Learner:
    """The policy and its optimizer.

    Weights and optimizer state are float32 whatever `model.dtype` says; with `bfloat16` the forward pass runs under
    autocast, and weights are written in bfloat16. Dropout is off. With the same threads, the same batches give the same
    weights to the bit.

    Args:
        settings: of the run.
        folder: the model to begin with; `settings.model.path` unless given.
        total_steps: where a falling learning rate ends; `settings.train.max_steps` unless given.
        device: the first GPU if there is one, unless given.

    Raises:
        SettingsError: there is no model in the folder, or the learning rate falls over an unknown number of steps.
    """

    def __init__(
        self, settings: Settings, *, folder: Path | None = None, total_steps: int = 0, device: str | None = None
    ) -> None:
        self.settings = settings
        self.steps = 0
        """Batches that came to `step`, skipped ones included."""
        self.skipped_steps = 0
        """Of those, batches after which no optimizer step, or not every one, was made because of a bad gradient."""
        self.total_steps = total_steps or settings.train.max_steps
        if settings.train.schedule != "constant" and not self.total_steps:
            raise SettingsError(
                f"train.schedule is {settings.train.schedule!r}, but where it ends is unknown; set train.max_steps"
            )
        torch.set_num_threads(settings.train.threads)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.base = Path(folder or settings.model.path)
        self.model: Any = _load(self.base).to(self.device)
        self.parameters: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        self.optimizer = _optimizer(self.parameters, settings)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def step(
        self,
        batch: Batch,
        version: int,
        *,
        filtered: Batch | None = None,
        dropped: Mapping[DropReason, int] | None = None,
    ) -> StepReport:
        """Train on one batch: `updates_per_batch` passes, each over all of it.

        Args:
            batch: the groups to train on; the group filter has been applied.
            version: the policy version of the weights now.
            filtered: groups that the filter dropped since the step before; they are measured, not trained.
            dropped: how many groups were dropped since then, by reason; for the metrics.
        """
        started = time.perf_counter()
        batch = batch.to(self.device)
        masks = derive_masks(batch, self.settings, version)
        advantages_C = self._advantages(batch, masks)
        skipped, work = "no_valid_row", self._work(batch, masks, advantages_C)
        rate = self._set_learning_rate()
        if work.denominator:
            skipped = self._train(work)
        else:
            log.warning("step.skipped", step=self.steps + 1, reason=skipped, completions=len(masks.baseline_C))
        self.steps += 1
        trained = not skipped or work.updates > 1
        metrics = step_metrics(
            batch,
            masks,
            advantages_C,
            version=version,
            too_old=int(
                too_old(batch.sampled_RT, batch.versions_RT, version, self.settings.pacing.max_token_age).sum()
            ),
            filtered=(filtered, derive_masks(filtered, self.settings, version)) if filtered else None,
            dropped=dropped,
        )
        metrics |= {"step": self.steps, "version": version, "learning_rate": rate, "trained": int(trained)}
        metrics |= {"loss": 0.0, **work.metrics(), "seconds": time.perf_counter() - started}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return StepReport(trained=trained, skipped=skipped, loss=float(metrics["loss"]), metrics=finite)

    def save_weights(self, folder: Path) -> None:
        """Write the policy in Hugging Face form to a new folder, which is there whole or not at all.

        Raises:
            FileExistsError: the folder exists.
            OSError: the disk is full, or refuses; nothing is left behind.
        """
        with new_folder(folder) as temporary:
            self.write_weights(temporary)

    def write_weights(self, folder: Path) -> None:
        """Write config, `model.safetensors`, generation config and the tokenizer's files into an existing folder."""
        dtype = getattr(torch, self.settings.model.dtype)
        self.model.save_pretrained(folder, state_dict=_cast(self.model.state_dict(), dtype), max_shard_size="1000GB")
        config = folder / "config.json"
        config.write_bytes(
            msgspec.json.format(
                msgspec.json.encode(msgspec.json.decode(config.read_bytes()) | {"dtype": self.settings.model.dtype})
            )
        )
        for pattern in COMPANIONS:
            for path in self.base.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)

    def state(self) -> dict[str, Tensor]:
        """Everything beside the weights that the next step depends on, by name; float32 weights where they differ."""
        tensors = {
            f"{kind}.{name}": value
            for name, parameter in self.parameters.items()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
        }
        if self.settings.model.dtype != "float32":
            tensors |= {f"master.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def restore(self, folder: Path, state: Mapping[str, Tensor], *, steps: int, skipped_steps: int = 0) -> None:
        """Go back to weights in Hugging Face form and to what `state` returned beside them.

        Raises:
            RunMismatchError: they belong to another model.
        """
        weights = {name: parameter.data for name, parameter in _load(folder).named_parameters()}
        if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise RunMismatchError(f"{folder}: its weights are not those of {self.base}; use another run name")
        self.optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state.get(f"master.{name}", weights[name]))
                kinds = {kind: state.get(f"{kind}.{name}") for kind in ("step", "exp_avg", "exp_avg_sq")}
                found = {
                    k: v.clone() if k == "step" else v.to(self.device, copy=True)
                    for k, v in kinds.items()
                    if v is not None
                }
                if found:
                    self.optimizer.state[parameter] = found
        self.steps, self.skipped_steps = steps, skipped_steps

    def _advantages(self, batch: Batch, masks: Masks) -> Tensor:
        algorithm = self.settings.algorithm
        return ESTIMATORS[algorithm.estimator](
            masks.rewards_C, batch.facts.group_ids_C, masks.baseline_C, msgspec.structs.asdict(algorithm)
        )

    def _work(self, batch: Batch, masks: Masks, advantages_C: Tensor) -> _Work:
        # Until the first pass fills it in, proximal is behaviour; with the engine's it stays so.
        return _Work(
            batch=batch,
            masks=masks,
            advantages_R=advantages_C.float()[batch.completion_ids_R],
            parts=split(batch, self.settings.train.micro_batch_tokens, masks.loss_R),
            proximal_RT=batch.behaviour_logprobs_RT.clone(),
            denominator=int(masks.tokens_RT.sum()),
        )

    def _train(self, work: _Work) -> str:
        """Make the updates of one batch; returns why it stopped, or nothing."""
        for _ in range(self.settings.train.updates_per_batch):
            self.optimizer.zero_grad(set_to_none=True)
            for rows in work.parts:
                self._backward(work, rows)
            norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.train.max_grad_norm)
            work.updates += 1
            work.add("grad_norm", float(norm))
            if not torch.isfinite(norm):
                self.skipped_steps += 1
                self.optimizer.zero_grad(set_to_none=True)
                log.error("step.skipped", step=self.steps + 1, reason="gradient_not_finite", norm=float(norm))
                return "gradient_not_finite"
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return ""

    def _backward(self, work: _Work, rows: Tensor) -> None:
        """Forward and backward over one micro-batch."""
        settings = self.settings
        width = int(work.batch.lengths_R[rows].max())
        mask_MT = work.masks.tokens_RT[rows, :width]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=settings.model.dtype == "bfloat16"):
            logprobs_N, entropy_N = token_logprobs(
                self.model,
                work.batch.tokens_RT[rows, :width],
                mask_MT,
                temperature=settings.rollout.temperature,
                entropy=work.updates == 0,
            )
        logprobs_MT = torch.zeros_like(mask_MT, dtype=logprobs_N.dtype).masked_scatter(mask_MT, logprobs_N)
        recompute = settings.algorithm.proximal == "recompute"
        if recompute and work.updates == 0:
            # The weights are still those of the moment when the batch was formed: this pass is the proximal pass.
            work.proximal_RT[rows, :width] = logprobs_MT.detach()
        if entropy_N is not None:
            work.add("entropy", float(entropy_N.sum()))
        options = msgspec.structs.asdict(settings.algorithm) | ({} if recompute else {"behaviour_cap": float("inf")})
        chosen = LOSSES[settings.algorithm.loss]
        output = chosen.function(
            logprobs_MT,
            work.proximal_RT[rows, :width],
            work.batch.behaviour_logprobs_RT[rows, :width],
            work.advantages_R[rows],
            mask_MT,
            denominator=work.denominator,
            **{name: options[name] for name in chosen.options if name in options},
        )
        output.loss.backward()  # type: ignore[no-untyped-call]
        work.count(output)

    def _set_learning_rate(self) -> float:
        train = self.settings.train
        rate = train.learning_rate * factor(
            self.steps, schedule=train.schedule, warmup_steps=train.warmup_steps, total_steps=self.total_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate


def _load(folder: Path) -> Any:
    """The model in a folder, float32, without dropout."""
    if not (folder / "config.json").is_file():
        raise SettingsError(f"{folder}: no model in Hugging Face form there (no config.json); check model.path")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()


def _optimizer(parameters: Mapping[str, torch.nn.Parameter], settings: Settings) -> torch.optim.AdamW:
    """AdamW; matrices decay, gains and biases do not."""
    matrices = {"params": [p for p in parameters.values() if p.ndim >= 2]}
    others = {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0}
    return torch.optim.AdamW(
        cast("list[dict[str, Any]]", [matrices, others]),
        lr=settings.train.learning_rate,
        betas=settings.train.betas,
        weight_decay=settings.train.weight_decay,
    )


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors in another type; those that share memory (tied embeddings) still do."""
    memo: dict[tuple[int, torch.Size], Tensor] = {}
    return {name: memo.setdefault((value.data_ptr(), value.shape), value.to(dtype)) for name, value in state.items()}
