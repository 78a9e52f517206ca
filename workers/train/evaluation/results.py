"""Results of evaluations: pass@k and mean reward over both denominators, by environment; `eval.jsonl`."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from stream.disk_space import persist
from stream.queue.evaluation import PromptEvaluation
from stream.trainer.folder_lock import RunFolderLock
from workers.runs.evaluations import FILE, GROUPS, EvaluationResult, EvaluationStats, read_lines, write_groups
from workers.train.algorithms.pass_at_k import pass_at_k
from workers.train.metrics_log import MetricsLog

EVALUATION_METRICS: Final[dict[str, str]] = {
    "eval/version": "the evaluated policy version; these metrics are in the line of the step after the evaluation",
    "eval/mean/valid": "mean over valid completions of held-out prompts",
    "eval/mean/all": "the same over all completions, with invalid ones as 0",
    "eval/pass@*": "`pass@K/valid`: of valid completions; `pass@K/all`: of all, with invalid ones counted as wrong",
    "eval/invalid": "invalid completions",
    "eval/mixed": "completions with a token of another policy version; they count in no mean",
}
"""Metrics of an evaluation that ended since the previous step; the trainer adds them."""


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Return the metrics of `EVALUATION_METRICS` for `metrics.jsonl`; means over nothing are omitted."""
    score = result.overall
    found = {"version": result.version, "mean/valid": score.mean_valid, "mean/all": score.mean_all}
    found |= {"mixed": score.mixed, "invalid": sum(score.invalid.values())}
    found |= {f"pass@{k}/{name}": value for k, both in score.pass_at.items() for name, value in both.items()}
    return {f"eval/{name}": value for name, value in found.items() if value is not None}


def summarize(
    evaluations: Mapping[str, PromptEvaluation], prompts: Mapping[str, tuple[str, int]], missing_state: str = "dead"
) -> tuple[EvaluationStats, dict[str, EvaluationStats]]:
    """Summarize the evaluations of all prompts.

    Args:
        evaluations: by prompt id.
        prompts: environment and number of completions of every prompt, by id.
        missing_state: state counted for the completions of a prompt without an evaluation.

    Returns:
        The statistics over all prompts, and by environment.
    """
    by_environment: dict[str, list[tuple[PromptEvaluation, int]]] = defaultdict(list)
    for prompt, (environment, count) in sorted(prompts.items()):  # sums must not depend on the order of arrival
        missing = PromptEvaluation(environment=environment, invalid={missing_state: count})
        by_environment[environment].append((evaluations.get(prompt) or missing, count))
    everything = [each for found in by_environment.values() for each in found]
    return _stats(everything), {name: _stats(found) for name, found in sorted(by_environment.items()) if name}


def _stats(counted: Sequence[tuple[PromptEvaluation, int]]) -> EvaluationStats:
    """Summarize prompt evaluations, each with the number of completions requested."""
    evaluations = [evaluation for evaluation, _ in counted]
    invalid = sum((Counter(each.invalid) for each in evaluations), Counter[str]())
    valid, reward_sum = sum(each.valid for each in evaluations), math.fsum(each.reward_sum for each in evaluations)
    valid_or_invalid = valid + invalid.total()
    return EvaluationStats(
        prompts=len(counted),
        n=sum(count for _, count in counted),
        valid=valid,
        invalid=dict(sorted(invalid.items())),
        mixed=sum(each.mixed_versions for each in evaluations),
        mean_valid=reward_sum / valid if valid else None,
        mean_all=reward_sum / valid_or_invalid if valid_or_invalid else None,
        pass_at=_pass_at(evaluations, max((count for _, count in counted), default=0)),
    )


def _pass_at(evaluations: Sequence[PromptEvaluation], max_k: int) -> dict[str, dict[str, float]]:
    successes_G = torch.tensor([each.successes for each in evaluations], dtype=torch.int64)
    valid_G = torch.tensor([each.valid for each in evaluations], dtype=torch.int64)
    all_G = torch.tensor([each.valid + sum(each.invalid.values()) for each in evaluations], dtype=torch.int64)
    pass_at: dict[str, dict[str, float]] = {}
    k = 1
    while k <= max_k:
        means = {}
        for name, n_G in (("valid", valid_G), ("all", all_G)):
            passed = pass_at_k(n_G, successes_G, k)
            if passed.known.any():
                means[name] = float(passed.value[passed.known].mean())
        pass_at[str(k)] = means
        k *= 2
    return pass_at


class EvaluationLog:
    """`eval.jsonl`, cut to the step of a checkpoint.

    Args:
        folder: the run's folder.
        step: of the checkpoint. Lines of later steps are about weights that are lost, so they are cut off.
        folder_lock: the trainer's lock on the folder, if other trainers may exist.
        cut: False leaves the file as it is until `cut` is called.
    """

    def __init__(self, folder: Path, step: int, folder_lock: RunFolderLock | None = None, *, cut: bool = True) -> None:
        results, length = [], 0
        for result, end_offset in read_lines(folder / FILE):
            if result.step > step:
                break
            results.append(result)
            length = end_offset
        self.results = results
        self._folder = folder
        self._file = MetricsLog(folder / FILE, length, folder_lock, cut=cut)

    @property
    def last(self) -> EvaluationResult | None:
        """The last result; None before the first."""
        return self.results[-1] if self.results else None

    def final_metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of the evaluation of the run's last step, which no line of `metrics.jsonl` has."""
        last = self.last
        return (
            {"step": step, "time": last.time, **evaluation_metrics(last)}
            if last is not None and last.step == step
            else {}
        )

    def cut(self) -> None:
        """Cut off the results of later steps."""
        self._file.cut()

    def append(self, result: EvaluationResult, groups: Sequence[bytes] = ()) -> None:
        """Write the scored groups, and then one line."""
        if groups:
            persist(self._folder / GROUPS, lambda: write_groups(self._folder, result.step, groups))
        self._file.append(msgspec.to_builtins(result))
        self.results.append(result)
