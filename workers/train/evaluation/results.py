"""What an evaluation found: pass@k and mean reward over both denominators, by environment; `eval.jsonl`."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct, field

from stream.queue.evaluation import PromptEvaluation
from stream.trainer.folder_lock import RunFolderLock
from workers.train.algorithms.pass_at_k import pass_at_k
from workers.train.metrics_log import MetricsLog

FILE = "eval.jsonl"
"""In the run's folder: a line to an evaluation."""


class EvaluationStats(Struct, kw_only=True):
    """How a policy did on some prompts: `n = valid + mixed + the sum of invalid`."""

    prompts: int
    n: int
    """Completions that were to be sampled."""
    valid: int
    """Of those, the ones that the version alone sampled, and somebody measured."""
    invalid: dict[str, int]
    """By state; `dead`: its prompt is a dead letter; `missing`: it did not come in time."""
    mixed: int
    """Some token was sampled by another policy version; in no mean."""
    mean_valid: float | None
    """Mean reward over valid completions; None where there is none."""
    mean_all: float | None
    """The same sum over valid and invalid completions: an invalid one has earned nothing."""
    pass_at: dict[str, dict[str, float]]
    """By k, then `valid` and `all`: the chance that one of k is right. Mean over prompts with k such completions; `all`
    counts an invalid one as wrong."""


class EvaluationResult(Struct, kw_only=True):
    """One evaluation: a line of `eval.jsonl`."""

    version: int
    """The policy version that it is of; -1 where it was never given a number."""
    step: int
    time: float
    """Unix time in seconds, at its end."""
    seconds: float
    """It took."""
    overall: EvaluationStats
    environments: dict[str, EvaluationStats] = field(default_factory=dict)
    """By name; none where the run has none."""

    def metrics(self) -> dict[str, float]:
        """Its figures for `metrics.jsonl`; a mean of nothing is left out."""
        score = self.overall
        found = {"version": self.version, "mean/valid": score.mean_valid, "mean/all": score.mean_all}
        found |= {"mixed": score.mixed, "invalid": sum(score.invalid.values())}
        found |= {f"pass@{k}/{name}": value for k, both in score.pass_at.items() for name, value in both.items()}
        return {f"eval/{name}": value for name, value in found.items() if value is not None}


def summarize(
    outcomes: Mapping[str, PromptEvaluation], prompts: Mapping[str, tuple[str, int]], missing_state: str = "dead"
) -> tuple[EvaluationStats, dict[str, EvaluationStats]]:
    """Sum up.

    Args:
        outcomes: by prompt.
        prompts: all that there were, each with its environment and number of completions.
        missing_state: what is said of the completions of prompts without an outcome.

    Returns:
        The score over all prompts, and by environment.
    """
    grouped: dict[str, list[tuple[PromptEvaluation, int]]] = defaultdict(list)
    for prompt, (environment, count) in sorted(prompts.items()):  # the order of sums must not hang on who was faster
        came = outcomes.get(prompt) or PromptEvaluation(environment=environment, invalid={missing_state: count})
        grouped[environment].append((came, count))
    every = [one for found in grouped.values() for one in found]
    return _stats(every), {name: _stats(found) for name, found in sorted(grouped.items()) if name}


def _stats(found: Sequence[tuple[PromptEvaluation, int]]) -> EvaluationStats:
    outcomes = [one for one, _ in found]
    invalid = sum((Counter(one.invalid) for one in outcomes), Counter[str]())
    valid, earned = sum(one.valid for one in outcomes), math.fsum(one.reward_sum for one in outcomes)
    counted = valid + invalid.total()
    return EvaluationStats(
        prompts=len(found),
        n=sum(count for _, count in found),
        valid=valid,
        invalid=dict(sorted(invalid.items())),
        mixed=sum(one.mixed_versions for one in outcomes),
        mean_valid=earned / valid if valid else None,
        mean_all=earned / counted if counted else None,
        pass_at=_pass_at(outcomes, max((count for _, count in found), default=0)),
    )


def _pass_at(outcomes: Sequence[PromptEvaluation], most: int) -> dict[str, dict[str, float]]:
    right_G = torch.tensor([one.successes for one in outcomes], dtype=torch.int64)
    valid_G = torch.tensor([one.valid for one in outcomes], dtype=torch.int64)
    every_G = torch.tensor([one.valid + sum(one.invalid.values()) for one in outcomes], dtype=torch.int64)
    found: dict[str, dict[str, float]] = {}
    k = 1
    while k <= most:
        told = {}
        for name, n_G in (("valid", valid_G), ("all", every_G)):
            passed = pass_at_k(n_G, right_G, k)
            if passed.known.any():
                told[name] = float(passed.value[passed.known].mean())
        found[str(k)] = told
        k *= 2
    return found


class EvaluationLog:
    """`eval.jsonl`, cut to what a checkpoint's weights have lived through.

    Args:
        folder: the run's.
        step: of the checkpoint. Lines of later steps tell of weights that are lost, and go.
        fence: the trainer's right to the folder.
    """

    def __init__(self, folder: Path, step: int, fence: RunFolderLock | None = None) -> None:
        kept, length = [], 0
        for line, upto in _lines(folder / FILE):
            if line.step > step:
                break
            kept.append(line)
            length = upto
        self.results = kept
        self._journal = MetricsLog(folder / FILE, length, fence)

    @property
    def last(self) -> EvaluationResult | None:
        """The last one; None before the first."""
        return self.results[-1] if self.results else None

    def append(self, line: EvaluationResult) -> None:
        """Write one."""
        self._journal.append(msgspec.to_builtins(line))
        self.results.append(line)


def read_evaluations(folder: Path) -> list[EvaluationResult]:
    """The evaluations of a run, from its folder; changes nothing."""
    return [line for line, _ in _lines(folder / FILE)]


def _lines(path: Path) -> Iterable[tuple[EvaluationResult, int]]:
    """Whole lines up to the first that is none, each with the bytes that end with it."""
    if not path.exists():
        return
    upto = 0
    for text in path.read_bytes().splitlines(keepends=True):
        upto += len(text)
        try:
            line = msgspec.json.decode(text, type=EvaluationResult)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if not text.endswith(b"\n"):
            return
        yield line, upto
