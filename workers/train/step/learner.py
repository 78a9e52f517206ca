"""Model and optimizer: one batch in, one step done, and weights to write. Knows nothing of streams."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import structlog
import torch
from torch import Tensor

from stream.errors import RunMismatchError, SettingsError
from stream.validity import DropReason
from workers.settings import Settings
from workers.train.algorithms.masks import too_old
from workers.train.algorithms.schedule import factor
from workers.train.keeping.durable import new_folder
from workers.train.model.adapter import Adapter, is_adapter
from workers.train.model.critic import Critic, hidden_size
from workers.train.model.logprobs import Readable
from workers.train.model.policy import load_policy, write_policy
from workers.train.model.recomputing import recompute_layers
from workers.train.ranks.ranks import Ranks
from workers.train.ranks.sharding import clip, fill, gathered, readable
from workers.train.step.batch import Batch
from workers.train.step.forming import Formed, form
from workers.train.step.metrics import Metrics, step_metrics
from workers.train.step.objective import correction_report
from workers.train.step.passes import Passes
from workers.train.step.selection import derive_masks
from workers.train.step.tally import Tally

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What became of one batch."""

    trained: bool
    """The optimizer moved, at least once."""
    skipped: str
    """Why not, or why it stopped before its last update: `no_valid_row`, `gradient_not_finite`; else empty."""
    dropped: dict[str, DropReason]
    """Groups that rollout correction left with too little to train on, by prompt id."""
    loss: float
    """Mean over updates; 0.0 where nothing was valid; may be NaN where the step was skipped."""
    metrics: Metrics
    """By the names in `workers.train.step.metrics.NAMES`."""


class Learner:
    """The policy and its optimizer; with `gae` a critic beside it, with a divergence the policy of the beginning.

    Weights and optimizer state are float32 whatever `model.dtype` says; with `bfloat16` the forward pass runs under
    autocast, and weights are written in bfloat16. With `lora.rank` this is true of the adapter, which alone is trained;
    the weights beside it have `model.dtype`. Dropout is off. With the same threads, the same batches give the same
    weights to the bit.

    With several ranks (`workers.train.ranks`) each has a learner. Policy, reference and optimizer state are sharded
    over them, the critic, which is small, is whole at each. Every rank calls the same methods in the same order; the
    first alone reads and writes files.

    Args:
        settings: of the run.
        folder: the model to begin with; `settings.model.path` unless given.
        total_steps: where a falling learning rate ends; `settings.train.max_steps` unless given.
        device: the first GPU if there is one, unless given; of several ranks on a machine each has its own.
        dtype: of weights and optimizer state.

    Raises:
        SettingsError: there is no model in the folder, the learning rate falls over an unknown number of steps, or the
            model has nothing that a critic could stand on, or an adapter could be put into.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        folder: Path | None = None,
        total_steps: int = 0,
        device: str | None = None,
        dtype: torch.dtype = torch.float32,
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
        self.ranks = Ranks(device)
        self.device, self.dtype = self.ranks.device, dtype
        self.base = Path(folder or settings.model.path)
        read = self._read(self.base, trained=True)
        self.model: Any = read.model
        self.adapter: Adapter | None = None
        if settings.lora.rank:
            if self.ranks.size > 1:
                raise SettingsError(
                    f"lora.rank is set, and the trainer has {self.ranks.size} ranks, which share whole models; set "
                    "train.ranks to 1, or leave [lora] out"
                )
            self.adapter = Adapter(self.model, self.base, settings.lora, settings.run.seed)
        if settings.train.gradient_checkpointing:
            recompute_layers(self.model)
        reference: Readable | None = None
        if settings.algorithm.kl_coefficient:
            reference = read if self.adapter else self._read(Path(settings.model.path), trained=False)
        self.critic = _critic(self.model, settings).to(self.device, dtype) if settings.estimator.name == "gae" else None
        as_begun = self.adapter.off if self.adapter else nullcontext
        self.passes = Passes(read, reference, self.critic, settings, self.ranks, as_begun=as_begun)
        self.parameters: dict[str, torch.nn.Parameter] = (
            self.adapter.parameters if self.adapter else dict(self.model.named_parameters())
        )
        self.critic_parameters = {f"critic.{n}": p for n, p in self.critic.named_parameters()} if self.critic else {}
        self.optimizer = _optimizer(self.parameters, self.critic_parameters, settings)

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
        formed = form(
            batch.to(self.device, self.dtype),
            self.settings,
            version,
            survey=self.passes.survey,
            seed=self.settings.run.seed + self.steps,
        )
        skipped, tally = "no_valid_row", Tally()
        rate = self._set_learning_rate()
        if formed.objective.totals.tokens:
            skipped = self._train(formed, tally)
            formed.objective.share_settled(self.ranks)
        else:
            log.warning("step.skipped", step=self.steps + 1, reason=skipped, completions=len(formed.masks.baseline_C))
        self.steps += 1
        trained = not skipped or tally.updates > 1
        metrics = step_metrics(
            formed.batch,
            formed.masks,
            formed.advantages.values_C,
            settings=self.settings,
            version=version,
            too_old=int(
                too_old(batch.sampled_RT, batch.versions_RT, version, self.settings.pacing.max_token_age).sum()
            ),
            filtered=(filtered, derive_masks(filtered, self.settings, version)) if filtered else None,
            dropped=Counter(dropped or {}) + Counter(formed.dropped.values()),
        )
        if trained:
            metrics |= correction_report(formed.objective, formed.rejection)
        metrics |= {"step": self.steps, "version": version, "learning_rate": rate, "trained": int(trained)}
        metrics |= {**tally.metrics(formed.objective.totals.tokens), "seconds": time.perf_counter() - started}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return StepReport(
            trained=trained, skipped=skipped, dropped=formed.dropped, loss=float(metrics["loss"]), metrics=finite
        )

    def save_weights(self, folder: Path) -> None:
        """Write what engines are given to a new folder, which is there whole or not at all.

        That is the policy in Hugging Face form, with the adapter merged if there is one; with `lora.publish =
        "adapter"` it is the adapter alone.

        Raises:
            FileExistsError: the folder exists.
            OSError: the disk is full, or refuses; nothing is left behind.
        """
        with new_folder(folder) as temporary:
            if self.adapter is None or self.settings.publishes_adapters:
                self.write_weights(temporary)
            else:
                self._write_policy(temporary)

    def write_weights(self, folder: Path) -> None:
        """Write what is trained into an existing folder, in Hugging Face form or as an adapter; at the first rank."""
        if self.adapter is not None:
            self.adapter.write(folder, self.settings.model.dtype)
        else:
            self._write_policy(folder)

    def read_weights(self, folder: Path) -> dict[str, Tensor]:
        """What `write_weights` wrote, by the names of `parameters`, in the type that they have here.

        Raises:
            RunMismatchError: it belongs to another model, or to a run with an adapter where there is none, or without.
        """
        if self.adapter is not None:
            return self.adapter.read(folder)
        if is_adapter(folder):
            raise RunMismatchError(
                f"{folder}: an adapter alone was trained there, but lora.rank is 0; put [lora] back, or use another "
                "run name"
            )
        weights = {name: parameter.data for name, parameter in load_policy(folder, self.dtype).named_parameters()}
        if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise RunMismatchError(f"{folder}: its weights are not those of {self.base}; use another run name")
        return weights

    def weights(self) -> dict[str, Tensor]:
        """The policy's tensors as they are written, whole, on the CPU; at other ranks than the first, nothing."""
        tensors = self.adapter.merged() if self.adapter else self.model.state_dict(keep_vars=True)
        return gathered(tensors, self.ranks, getattr(torch, self.settings.model.dtype))

    def state(self) -> dict[str, Tensor]:
        """Everything beside the weights that the next step depends on, by name, whole, on the CPU.

        That is the optimizer's state, weights as they are where those written differ, and the critic. At other ranks
        than the first it is nothing.
        """
        trained = self.parameters | self.critic_parameters
        tensors = {
            f"{kind}.{name}": value
            for name, parameter in trained.items()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
        }
        masters = self.critic_parameters if self.written_dtype == self.dtype else trained
        tensors |= {f"master.{name}": parameter for name, parameter in masters.items()}
        return {name: tensor.contiguous() for name, tensor in gathered(tensors, self.ranks).items()}

    def restore(self, folder: Path, state: Mapping[str, Tensor], *, steps: int, skipped_steps: int = 0) -> None:
        """Go back to what `write_weights` wrote and to what `state` returned beside it; at the first rank.

        The others call `put_back` meanwhile. However many ranks wrote them, any number may go on.

        Raises:
            RunMismatchError: they belong to another model, or were trained without the critic that there is now.
        """
        weights = self.read_weights(folder)
        weights |= {name: state[f"master.{name}"] for name in self.critic_parameters if f"master.{name}" in state}
        for name, parameter in self.critic_parameters.items():
            if name not in weights or weights[name].shape != parameter.shape:
                raise RunMismatchError(f"{folder}: it has no such critic ({name}); use another run name")
        tensors = {f"master.{name}": weight for name, weight in weights.items()} | dict(state)
        self.put_back(tensors, [*tensors], steps=steps, skipped_steps=skipped_steps)

    def put_back(
        self, tensors: Mapping[str, Tensor], names: Sequence[str], *, steps: int, skipped_steps: int = 0
    ) -> None:
        """Set weights and optimizer state, at every rank its part of them.

        Args:
            tensors: `master.NAME` of every parameter, and what `state` says of the optimizer; at the first rank.
            names: of these, at every rank.
            steps: batches that had come to `step`.
            skipped_steps: of these, those that were skipped.
        """
        given = set(names)
        self.optimizer.state.clear()
        for name, parameter in (self.parameters | self.critic_parameters).items():
            fill(parameter, tensors.get(f"master.{name}"), self.ranks)
            empty = {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}
            found = {
                kind: torch.zeros_like(like, requires_grad=False)
                for kind, like in empty.items()
                if f"{kind}.{name}" in given
            }
            for kind, tensor in found.items():
                fill(tensor, tensors.get(f"{kind}.{name}"), self.ranks)
            if found:
                self.optimizer.state[parameter] = found
        self.steps, self.skipped_steps = steps, skipped_steps

    @property
    def written_dtype(self) -> torch.dtype:
        """In which `write_weights` writes what is trained."""
        return torch.float32 if self.adapter else cast("torch.dtype", getattr(torch, self.settings.model.dtype))

    def _write_policy(self, folder: Path) -> None:
        weights = self.weights()
        if self.ranks.leads:
            write_policy(self.model, weights, self.base, folder, self.settings.model.dtype)

    def _read(self, folder: Path, *, trained: bool) -> Readable:
        mixed = self.settings.model.dtype == "bfloat16"
        dtype = torch.bfloat16 if mixed and self.settings.lora.rank else self.dtype
        whole = load_policy(folder, dtype).requires_grad_(trained) if self.ranks.leads else None
        return readable(whole, self.ranks, mixed=mixed)

    def _train(self, formed: Formed, tally: Tally) -> str:
        """Make the updates of one batch; returns why it stopped, or nothing."""
        parts = self.passes.micro_batches(formed.batch, formed.masks.loss_R)
        bound = self.settings.train.max_grad_norm
        for update in range(self.settings.train.updates_per_batch):
            self.optimizer.zero_grad(set_to_none=True)
            share = Tally()
            for rows in parts:
                if rows is None:
                    self.passes.idle(formed.batch)
                    continue
                output = self.passes.backward(formed, rows, first=update == 0)
                share.add({"loss": output.loss.detach(), **output.sums}, output.maxima)
            self.ranks.add_gradients(self.critic_parameters.values())  # those of shards have been added up
            tally.add(*self.ranks.combine(share.sums, share.maxima))
            norm = clip(self.parameters.values(), bound)
            sound = torch.isfinite(norm)
            if self.critic is not None:
                sound &= torch.isfinite(clip(self.critic_parameters.values(), bound))
            tally.updates += 1
            tally.add({"grad_norm": norm}, {})
            if not sound:
                self.skipped_steps += 1
                self.optimizer.zero_grad(set_to_none=True)
                log.error("step.skipped", step=self.steps + 1, reason="gradient_not_finite", norm=float(norm))
                return "gradient_not_finite"
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return ""

    def _set_learning_rate(self) -> float:
        train = self.settings.train
        factor_now = factor(
            self.steps, schedule=train.schedule, warmup_steps=train.warmup_steps, total_steps=self.total_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor_now
        return train.learning_rate * factor_now


def _critic(model: Any, settings: Settings) -> Critic:
    try:
        return Critic(hidden_size(model), settings.critic.width, settings.run.seed)
    except ValueError as error:
        raise SettingsError(f"model.path = {settings.model.path!r} with estimator.name = 'gae': {error}") from error


def _optimizer(
    parameters: Mapping[str, torch.nn.Parameter], critic: Mapping[str, torch.nn.Parameter], settings: Settings
) -> torch.optim.AdamW:
    """AdamW; matrices of the policy decay, gains, biases and the critic do not."""
    peak = settings.train.learning_rate
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "peak": peak},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0, "peak": peak},
        {"params": [*critic.values()], "weight_decay": 0.0, "peak": settings.critic.learning_rate},
    ]
    return torch.optim.AdamW(
        cast("list[dict[str, Any]]", [group for group in groups if group["params"]]),
        lr=settings.train.learning_rate,
        betas=settings.train.betas,
        weight_decay=settings.train.weight_decay,
    )
