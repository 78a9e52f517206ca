"""The learner: trains a model on one batch at a time and writes its weights. It knows nothing of streams."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from stream.durable import create_folder_atomically
from stream.errors import RunMismatchError, SettingsError
from stream.records import TrainedCompletion
from stream.validity import DropReason
from workers.role.memory import PassMemory
from workers.settings import Settings
from workers.settings.estimator_options import Gae
from workers.train.model.lm_head import Critic, hidden_size
from workers.train.model.trainable_model import TrainableModel
from workers.train.ranks import Ranks, gather_full
from workers.train.step.batch import Batch
from workers.train.step.device_memory import MicroBatchChoice, choose_micro_batch, plan_loaded
from workers.train.step.group_checks import GroupRewards, count_without_loss, describe_completions
from workers.train.step.memory_plan import TrainerMemory
from workers.train.step.model_runner import ModelRunner
from workers.train.step.optimizer import Optimizer
from workers.train.step.prepared_batch import CompleteComparison, PreparedBatch, prepare
from workers.train.step.step_metrics import (
    StepAccumulator,
    StepReport,
    correction_step_metrics,
    omit_constants,
    step_metrics,
)
from workers.train.step.trained_rows import trained_rows

log = structlog.get_logger()


class Learner:
    """The policy and its optimizer, with a critic for `gae` and a reference policy for a KL penalty.

    Weights and optimizer state are float32 whatever `model.dtype` is; with `bfloat16` the forward pass runs under
    autocast, and weights are written in bfloat16. With `lora.rank` this holds for the adapter, which is the only part
    that trains; the base weights have `model.dtype`. Dropout is off. With the same number of threads, the same batches
    give bit-identical weights.

    With several ranks each one has a learner. Policy, reference and optimizer state are sharded over the ranks; adapter
    and critic are small and replicated. Every rank calls the same methods in the same order; only rank 0 reads and
    writes files.

    Args:
        settings: of the run.
        device: the first GPU if there is one, by default; with several ranks on a machine each has its own.
        dtype: of weights and optimizer state.

    Raises:
        SettingsError: the folder holds no model, the learning rate decays over an unknown number of steps, or the model
            cannot take the critic or the adapter.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        device: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.settings = settings
        self.steps = 0
        """Batches passed to `step`, including skipped ones."""
        self.skipped_steps = 0
        """Those among them whose optimizer step was omitted because of a gradient that is not finite."""
        if settings.train.schedule != "constant" and not settings.train.max_steps:
            raise SettingsError(
                f"train.schedule is {settings.train.schedule!r}, but the number of steps is unknown; set "
                "train.max_steps"
            )
        torch.set_num_threads(settings.run.threads)
        self.ranks = Ranks(device)
        self.device, self.dtype = self.ranks.device, dtype
        self.policy = TrainableModel(settings, settings.model.folder, self.ranks, dtype)
        self.model, self.parameters = self.policy.model, self.policy.parameters
        self.critic = None
        if isinstance(settings.estimator, Gae):
            self.critic = _critic(self.model, settings, settings.estimator.critic_width).to(self.device, dtype)
        self.critic_parameters = {f"critic.{n}": p for n, p in self.critic.named_parameters()} if self.critic else {}
        reference, as_reference = self.policy.reference() if settings.algorithm.kl_coefficient else (None, nullcontext)
        self.runner = ModelRunner(
            self.policy.logprob_model, reference, self.critic, settings, self.ranks, as_reference=as_reference
        )
        self.optimizer = Optimizer(self.parameters, self.critic_parameters, settings)
        self.choice: MicroBatchChoice | None = None
        """The tokens of a pass that fit into memory; None if the settings name a number."""
        if settings.train.micro_batch_tokens == "auto":
            shares = self.runner.policy.can_share
            self.choice = choose_micro_batch(settings, self.plan_memory, self.ranks, shares=shares)
            self.runner.micro_batch_tokens = self.choice.tokens
        self._keeps_trained_tokens = self.ranks.is_rank0 and settings.archive.keep != "none"

    @property
    def vocab_size(self) -> int:
        """Number of token ids in the model's embedding."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def micro_batch_tokens(self) -> int:
        """The largest number of tokens of a pass."""
        return self.runner.micro_batch_tokens

    def use_micro_batch_tokens(self, tokens: int) -> None:
        """Set the largest number of tokens of a pass: sums in the same order give the same bits."""
        self.runner.micro_batch_tokens = tokens

    def step(
        self,
        batch: Batch,
        version: int,
        *,
        filtered: Sequence[GroupRewards] = (),
        dropped: Mapping[DropReason, int] | None = None,
    ) -> StepReport:
        """Train on one batch: `train.updates_per_batch` updates, each over all of it.

        Args:
            batch: groups that passed the filters.
            version: the policy version of the current weights.
            filtered: rewards of groups that the filters dropped since the previous step, for metrics.
            dropped: number of groups dropped since then, by reason; for metrics.
        """
        started = time.perf_counter()
        prepared = prepare(
            batch.to(self.device, self.dtype),
            self.settings,
            version,
            compute_statistics=self.runner.forward_statistics,
            seed=self.settings.run.seed + self.steps,
        )
        skipped, accumulator = "no_valid_row", StepAccumulator()
        learning_rate = self.optimizer.set_learning_rate(self.steps)
        if prepared.loss_weights.loss_tokens:
            skipped = self._train(prepared, accumulator)
        else:
            log.warning("step.skipped", step=self.steps + 1, reason=skipped, completions=len(prepared.masks.baseline_C))
        self.steps += 1
        trained = not skipped or accumulator.updates > 1
        metrics = step_metrics(
            prepared.batch,
            prepared.masks,
            prepared.advantages.values_C,
            settings=self.settings,
            version=version,
            filtered=filtered,
            dropped=Counter(dropped or {}) + Counter(prepared.drop_reasons.values()),
        )
        if trained:
            metrics |= correction_step_metrics(prepared, self.settings)
        metrics |= {"step": self.steps, "version": version, "learning_rate": learning_rate, "trained": int(trained)}
        metrics |= omit_constants(accumulator.metrics(prepared.loss_weights.loss_tokens), self.settings)
        metrics["seconds"] = time.perf_counter() - started
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return StepReport(
            trained=trained,
            skipped=skipped,
            dropped=prepared.drop_reasons,
            loss=float(metrics["loss"]),
            metrics=finite,
            without_loss=count_without_loss(prepared.batch, prepared.masks),
            completions=self._describe(prepared, trained=trained),
        )

    def copy_weights(self) -> Callable[[Path], None]:
        """Copy the weights for the engines.

        The copy is the policy with any adapter merged, or with `weights.transport = "adapter"` the adapter alone.

        Returns:
            A function that writes the copy to a new folder, in Hugging Face form, while later steps train. The folder
            appears complete or not at all. It raises `FileExistsError` if the folder exists, `OSError` if the disk is
            full or fails; nothing is left behind then.
        """
        if self.policy.adapter is not None and self.settings.publishes_adapters:
            dtype, tensors = self.settings.model.dtype, self.policy.adapter.copy_tensors()
            write: Callable[[Path], None] = partial(self.policy.adapter.save, dtype_name=dtype, tensors=tensors)
        else:
            write = partial(self.policy.save_policy, weights=self.weights(copy=True))

        def write_folder(folder: Path) -> None:
            with create_folder_atomically(folder) as temporary:
                write(temporary)

        return write_folder

    def write_trained_weights(self, folder: Path) -> None:
        """Write the trained weights to an existing folder, in Hugging Face form or as an adapter; rank 0 only."""
        if self.policy.adapter is not None:
            self.policy.adapter.save(folder, self.settings.model.dtype)
        else:
            self.policy.save_policy(folder, self.weights())

    def weights(self, *, copy: bool = False) -> dict[str, Tensor]:
        """Return the full policy tensors as they are written, on the CPU; empty on other ranks than 0.

        Args:
            copy: the next step leaves them as they are. Otherwise they may share memory with the policy.
        """
        return self.policy.weights(copy=copy)

    def state(self) -> dict[str, Tensor]:
        """Return all other tensors that the next step depends on, by name, full, on the CPU; empty on other ranks.

        These are the optimizer's state, the critic, and the weights in training precision if written weights differ.
        """
        as_written = self.policy.saved_dtype == self.dtype
        masters = self.critic_parameters if as_written else self.parameters | self.critic_parameters
        tensors = self.optimizer.state() | {f"master.{name}": parameter for name, parameter in masters.items()}
        return {name: tensor.contiguous() for name, tensor in gather_full(tensors, self.ranks).items()}

    def restore(self, folder: Path, state: Mapping[str, Tensor], *, steps: int, skipped_steps: int = 0) -> None:
        """Restore what `write_trained_weights` wrote and `state` returned; rank 0 only, while others call `load_state`.

        The number of ranks may differ from the one that wrote them.

        Raises:
            RunMismatchError: they belong to another model, or to a run without this critic.
        """
        weights = self.policy.load_trained_weights(folder)
        weights |= {name: state[f"master.{name}"] for name in self.critic_parameters if f"master.{name}" in state}
        for name, parameter in self.critic_parameters.items():
            if name not in weights or weights[name].shape != parameter.shape:
                raise RunMismatchError(f"{folder}: it has no such critic ({name}); use another run name")
        tensors = {f"master.{name}": weight for name, weight in weights.items()} | dict(state)
        self.load_state(tensors, [*tensors], steps=steps, skipped_steps=skipped_steps)

    def load_state(
        self, tensors: Mapping[str, Tensor], names: Sequence[str], *, steps: int, skipped_steps: int = 0
    ) -> None:
        """Set weights and optimizer state; each rank takes its shard.

        Args:
            tensors: `master.NAME` of every parameter, and the optimizer's tensors from `state`; rank 0 only.
            names: of these, on every rank.
            steps: batches passed to `step` so far.
            skipped_steps: of these, those that were skipped.
        """
        self.optimizer.load_state(tensors, set(names), self.ranks)
        self.steps, self.skipped_steps = steps, skipped_steps

    def plan_memory(self, passes: PassMemory) -> TrainerMemory:
        """Return what this rank needs if its passes need that."""
        models = [self.runner.policy.model, *([self.runner.reference.model] if self.runner.reference else [])]
        weights = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        critic = [*self.critic_parameters.values()]
        trained = [*self.parameters.values(), *critic]
        return plan_loaded(self.settings, [*weights, *critic], trained, passes, self.ranks)

    def _describe(self, prepared: PreparedBatch, *, trained: bool) -> dict[str, list[TrainedCompletion]]:
        rows = trained_rows(prepared, trained=trained) if self._keeps_trained_tokens else None
        return describe_completions(prepared.batch, prepared.masks, prepared.advantages.values_C, rows)

    def _train(self, prepared: PreparedBatch, accumulator: StepAccumulator) -> str:
        """Run the updates of one batch; return why they stopped early, or an empty string."""
        plan = self.runner.plan(prepared.batch, prepared.masks.loss_rows_R)
        parts = self.ranks.local_batches(plan.parts)
        accumulator.forwarded, accumulator.shared = plan.forwarded, plan.tokens - plan.forwarded
        skipped = ""
        for update in range(self.settings.train.updates_per_batch):
            self.optimizer.zero_grad()
            local = StepAccumulator()
            for part in parts:
                if part is None:
                    self.runner.dummy_forward(prepared.batch)
                    continue
                output = self.runner.backward(prepared, part, first=update == 0)
                local.add({"loss": output.loss.detach(), **output.sums}, output.maxima)
            self.ranks.all_reduce_gradients((self.parameters | self.critic_parameters).values())
            accumulator.add(*self.ranks.all_reduce_metrics(local.sums, local.maxima))
            norm, finite = self.optimizer.clip_gradients()
            accumulator.updates += 1
            accumulator.add({"grad_norm": norm}, {})
            if not finite:
                self.skipped_steps += 1
                skipped = DropReason.GRADIENT_NOT_FINITE
                log.error("step.skipped", step=self.steps + 1, reason=skipped, norm=float(norm))
                break
            self.optimizer.step()
        self.runner.use_row_attention()
        self.optimizer.zero_grad()
        if not isinstance(prepared.policies, CompleteComparison):
            self.ranks.all_reduce(prepared.policies.old_logprobs_RT)
        return skipped


def _critic(model: Any, settings: Settings, width: int) -> Critic:
    try:
        return Critic(hidden_size(model), width, settings.run.seed)
    except ValueError as error:
        raise SettingsError(f"model.path = {settings.model.path!r} with estimator.name = 'gae': {error}") from error
