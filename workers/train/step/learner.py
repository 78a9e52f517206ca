"""Model and optimizer: one batch in, one step done, and weights to write. Knows nothing of streams."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from stream.durable import create_folder_atomically
from stream.errors import RunMismatchError, SettingsError
from stream.validity import DropReason
from workers.settings import Settings
from workers.settings.estimators import Gae
from workers.train.algorithms.masks import too_old_tokens
from workers.train.distributed.ranks import Ranks
from workers.train.distributed.sharding import gather_full
from workers.train.model.critic import Critic, hidden_size
from workers.train.model.trainable_model import TrainableModel
from workers.train.step.accumulator import StepAccumulator
from workers.train.step.batch import Batch
from workers.train.step.metrics import step_metrics
from workers.train.step.model_runner import ModelRunner
from workers.train.step.objective import correction_step_metrics
from workers.train.step.optimizer import Optimizer
from workers.train.step.prepared_batch import PreparedBatch, prepare
from workers.train.step.report import StepReport
from workers.train.step.selection import mask_batch

log = structlog.get_logger()


class Learner:
    """The policy and its optimizer; with `gae` a critic beside it, with a divergence the policy of the beginning.

    Weights and optimizer state are float32 whatever `model.dtype` says; with `bfloat16` the forward pass runs under
    autocast, and weights are written in bfloat16. With `lora.rank` this is true of the adapter, which alone is trained;
    the weights beside it have `model.dtype`. Dropout is off. With the same threads, the same batches give the same
    weights to the bit.

    With several ranks (`workers.train.rank_control`) each has a learner. Policy, reference and optimizer state are
    sharded
    over them; adapter and critic, which are small, are whole at each. Every rank calls the same methods in the same
    order; the first alone reads and writes files.

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
        torch.set_num_threads(settings.run.threads)
        self.ranks = Ranks(device)
        self.device, self.dtype = self.ranks.device, dtype
        self.policy = TrainableModel(settings, Path(folder or settings.model.path), self.ranks, dtype)
        self.model, self.parameters = self.policy.model, self.policy.parameters
        self.critic = None
        if isinstance(settings.estimator, Gae):
            self.critic = _critic(self.model, settings, settings.estimator.critic_width).to(self.device, dtype)
        self.critic_parameters = {f"critic.{n}": p for n, p in self.critic.named_parameters()} if self.critic else {}
        reference, as_begun = self.policy.reference() if settings.algorithm.kl_coefficient else (None, nullcontext)
        self.runner = ModelRunner(
            self.policy.logprob_model, reference, self.critic, settings, self.ranks, as_reference=as_begun
        )
        self.optimizer = Optimizer(self.parameters, self.critic_parameters, settings)

    @property
    def vocab_size(self) -> int:
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
        formed = prepare(
            batch.to(self.device, self.dtype),
            self.settings,
            version,
            compute_statistics=self.runner.forward_statistics,
            seed=self.settings.run.seed + self.steps,
        )
        skipped, tally = "no_valid_row", StepAccumulator()
        rate = self.optimizer.set_learning_rate(self.steps, self.total_steps)
        if formed.objective.totals.tokens:
            skipped = self._train(formed, tally)
            formed.objective.add_over_ranks(self.ranks)
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
                too_old_tokens(batch.sampled_RT, batch.versions_RT, version, self.settings.pacing.max_token_age).sum()
            ),
            filtered=(filtered, mask_batch(filtered, self.settings, version)) if filtered else None,
            dropped=Counter(dropped or {}) + Counter(formed.dropped.values()),
        )
        if trained:
            metrics |= correction_step_metrics(formed.objective, formed.rejection)
        metrics |= {"step": self.steps, "version": version, "learning_rate": rate, "trained": int(trained)}
        metrics |= {**tally.metrics(formed.objective.totals.tokens), "seconds": time.perf_counter() - started}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return StepReport(
            trained=trained, skipped=skipped, dropped=formed.dropped, loss=float(metrics["loss"]), metrics=finite
        )

    def save_weights(self, folder: Path) -> None:
        """Write what engines are given to a new folder, which is there whole or not at all.

        That is the policy in Hugging Face form, with the adapter merged if there is one; with `weights.transport =
        "adapter"` it is the adapter alone.

        Raises:
            FileExistsError: the folder exists.
            OSError: the disk is full, or refuses; nothing is left behind.
        """
        with create_folder_atomically(folder) as temporary:
            if self.policy.adapter is None or self.settings.publishes_adapters:
                self.write_trained_weights(temporary)
            else:
                self.policy.save_policy(temporary, self.weights())

    def write_trained_weights(self, folder: Path) -> None:
        """Write what is trained into an existing folder, in Hugging Face form or as an adapter; at the first rank."""
        if self.policy.adapter is not None:
            self.policy.adapter.save(folder, self.settings.model.dtype)
        else:
            self.policy.save_policy(folder, self.weights())

    def weights(self) -> dict[str, Tensor]:
        """The policy's tensors as they are written, whole, on the CPU; at other ranks than the first, nothing."""
        return self.policy.weights()

    def state(self) -> dict[str, Tensor]:
        """Everything beside the weights that the next step depends on, by name, whole, on the CPU.

        That is the optimizer's state, weights as they are where those written differ, and the critic. At other ranks
        than the first it is nothing.
        """
        as_written = self.policy.saved_dtype == self.dtype
        masters = self.critic_parameters if as_written else self.parameters | self.critic_parameters
        tensors = self.optimizer.state() | {f"master.{name}": parameter for name, parameter in masters.items()}
        return {name: tensor.contiguous() for name, tensor in gather_full(tensors, self.ranks).items()}

    def restore(self, folder: Path, state: Mapping[str, Tensor], *, steps: int, skipped_steps: int = 0) -> None:
        """Go back to what `write_weights` wrote and to what `state` returned beside it; at the first rank.

        The others call `load_state` meanwhile. However many ranks wrote them, any number may go on.

        Raises:
            RunMismatchError: they belong to another model, or were trained without the critic that there is now.
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
        """Set weights and optimizer state, at every rank its part of them.

        Args:
            tensors: `master.NAME` of every parameter, and what `state` says of the optimizer; at the first rank.
            names: of these, at every rank.
            steps: batches that had come to `step`.
            skipped_steps: of these, those that were skipped.
        """
        self.optimizer.load_state(tensors, set(names), self.ranks)
        self.steps, self.skipped_steps = steps, skipped_steps

    def _train(self, formed: PreparedBatch, tally: StepAccumulator) -> str:
        """Make the updates of one batch; returns why it stopped, or nothing."""
        parts = self.runner.micro_batches(formed.batch, formed.masks.loss_rows_R)
        for update in range(self.settings.train.updates_per_batch):
            self.optimizer.zero_grad()
            share = StepAccumulator()
            for rows in parts:
                if rows is None:
                    self.runner.dummy_forward(formed.batch)
                    continue
                output = self.runner.backward(formed, rows, first=update == 0)
                share.add({"loss": output.loss.detach(), **output.sums}, output.maxima)
            self.ranks.all_reduce_gradients((self.parameters | self.critic_parameters).values())
            tally.add(*self.ranks.all_reduce_metrics(share.sums, share.maxima))
            norm, sound = self.optimizer.clip_gradients()
            tally.updates += 1
            tally.add({"grad_norm": norm}, {})
            if not sound:
                self.skipped_steps += 1
                self.optimizer.zero_grad()
                log.error("step.skipped", step=self.steps + 1, reason="gradient_not_finite", norm=float(norm))
                return "gradient_not_finite"
            self.optimizer.step()
        self.optimizer.zero_grad()
        return ""


def _critic(model: Any, settings: Settings, width: int) -> Critic:
    try:
        return Critic(hidden_size(model), width, settings.run.seed)
    except ValueError as error:
        raise SettingsError(f"model.path = {settings.model.path!r} with estimator.name = 'gae': {error}") from error
