"""Bias of advantages when rewards fail, masked or scored 0.0, compared to the advantages without failures.

    python -m benchmarks.masking.advantage_bias            10,000 draws on groups.json, then draw the figures
    python -m benchmarks.masking.advantage_bias --replot   only draw the figures from advantage_bias.json

In each draw every reward that may fail does so with probability 0.5: rewards of right answers only, or of any answer.
The stored groups (`stored_groups.py`) are fixed, so each answer has one true advantage and draws are independent. The
95 % intervals are over draws, not over other groups. Only estimators are studied, not the pipeline's filter of groups
with too few measured answers.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from workers.train.algorithms.advantages import estimate
from workers.train.algorithms.grouping import Grouping

HERE = Path(__file__).parent
RESULTS = HERE / "advantage_bias.json"
ESTIMATORS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "grpo": ("grpo", {"normalize_std": True, "leave_one_out": False, "epsilon": 1e-4}),
    "grpo without std": ("grpo", {"normalize_std": False, "leave_one_out": False, "epsilon": 1e-4}),
    "rloo": ("rloo", {}),
    "opo": ("opo", {}),
    "max_rl": ("max_rl", {"epsilon": 1e-6}),
    "pass@4": ("passk", {"k": 4}),
}
"""Label -> name and options of the estimator."""
FAILURES = ("right answers only", "any answer")
"""Whom failures may hit."""
HANDLINGS = ("masked", "scored zero")
Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored groups, one entry for each answer."""

    rewards: Tensor
    """float64, 0 or 1."""
    lengths: Tensor
    """int64, sampled tokens."""
    group_ids: Tensor
    """int64 codes 0 ... groups - 1."""

    @property
    def groups(self) -> int:
        """Number of groups."""
        return int(self.group_ids.max()) + 1

    @property
    def right(self) -> Tensor:
        """Whether each answer is right."""
        return self.rewards == 1

    @property
    def siblings_right(self) -> Tensor:
        """Number of right answers in the group of each answer."""
        groups = Grouping(self.group_ids, torch.ones_like(self.right), self.groups)
        return groups.broadcast(groups.sum(self.rewards)).long()


def load(file: Path) -> Stored:
    """Read the stored groups."""
    groups = msgspec.json.decode(file.read_bytes())
    ids = [number for number, group in enumerate(groups) for _ in group["rewards"]]
    rewards = [reward for group in groups for reward in group["rewards"]]
    lengths = [length for group in groups for length in group["lengths"]]
    return Stored(torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths), torch.tensor(ids))


def draw(stored: Stored, failures: str, share: float, draws: int, generator: torch.Generator) -> Tensor:
    """Draw which rewards fail, bool (draws, answers)."""
    failed = torch.rand(draws, len(stored.rewards), generator=generator) < share
    return failed & stored.right if failures == FAILURES[0] else failed


def advantages(stored: Stored, label: str, failed: Tensor, handling: str) -> Tensor:
    """Return advantages (draws, answers) given failed rewards; 0 for masked answers."""
    draws = len(failed)
    valid, instead = (~failed, math.nan) if handling == "masked" else (torch.ones_like(failed), 0.0)
    codes = stored.group_ids + stored.groups * torch.arange(draws).unsqueeze(1)
    name, options = ESTIMATORS[label]
    rewards = torch.where(failed, instead, stored.rewards).flatten()
    inputs = {
        "rewards_C": rewards,
        "correct_C": rewards == 1,
        "groups": Grouping(codes.flatten(), valid.flatten(), stored.groups * draws),
        "lengths_C": torch.where(valid, stored.lengths, 0).flatten(),
        "loss_lengths_C": torch.where(valid, stored.lengths, 0).flatten(),
    }
    return estimate(name, inputs, options, single_sample_policy="zero").view(draws, -1)


def compare(stored: Stored, label: str, failed: Tensor, handling: str) -> dict[str, Tensor]:
    """Return sums over answers, each (draws, 2, sizes): by correctness, and by the number of right answers."""
    truth = advantages(stored, label, torch.zeros_like(failed[:1]), handling)[0]
    result = advantages(stored, label, failed, handling)
    trains = ~failed if handling == "masked" else torch.ones_like(failed)
    error = torch.where(trains, result - truth, 0.0)
    wrong_way = trains & (torch.where(stored.right, -result, result) > 0)
    sizes = int(stored.group_ids.bincount().max()) + 1
    cells = stored.right * sizes + stored.siblings_right

    def sums(values: Tensor) -> Tensor:
        zeros = torch.zeros(len(failed), 2 * sizes, dtype=torch.float64)
        return zeros.index_add(1, cells, values.double().expand(len(failed), -1)).view(-1, 2, sizes)

    return {
        "answers": sums(torch.ones_like(truth)),
        "truth": sums(truth),
        "trains": sums(trains),
        "error": sums(error),
        "wrong_way": sums(wrong_way),
        "failed": sums(failed),
        "advantage_failed": sums(torch.where(failed, result, 0.0)),
    }


def mean(sums: Tensor, counts: Tensor) -> tuple[float, float] | None:
    """Return the mean and half the width of its 95 % interval (a ratio of sums over independent draws)."""
    if not counts.any():
        return None
    ratio = sums.sum() / counts.sum()
    spread = (sums - ratio * counts).std() / counts.mean() / len(sums) ** 0.5
    return float(ratio), Z_95 * float(spread)


def summarise(sums: dict[str, Tensor], right: int) -> dict[str, Any]:
    """Summarize right (1) or wrong (0) answers; each mean with half its interval.

    `bias` and `wrong_way` (the share with an advantage of the wrong sign) are means over the answers that bear loss.
    """
    of = {name: values[:, right] for name, values in sums.items()}
    whole = {name: values.sum(dim=1) for name, values in of.items()}
    sizes = range(of["trains"].shape[1])
    return {
        "truth": float(whole["truth"].sum() / whole["answers"].sum()),
        "bias": mean(whole["error"], whole["trains"]),
        "wrong_way": mean(whole["wrong_way"], whole["trains"]),
        "by_siblings_right": {
            str(k): {
                "truth": float(of["truth"][:, k].sum() / of["answers"][:, k].sum()),
                "bias": mean(of["error"][:, k], of["trains"][:, k]),
                "advantage_failed": mean(of["advantage_failed"][:, k], of["failed"][:, k]),
            }
            for k in sizes
            if of["answers"][:, k].any()
        },
    }


def results(stored: Stored, draws: int, share: float, seed: int, chunk: int = 250) -> Iterator[dict[str, Any]]:
    """Yield one entry for each estimator, kind of failures, handling, and right or wrong answers."""
    for failures in FAILURES:
        for label in ESTIMATORS:
            for handling in HANDLINGS:
                generator = torch.Generator().manual_seed(seed)  # the same failures for all
                parts = [
                    compare(stored, label, draw(stored, failures, share, size, generator), handling)
                    for size in [chunk] * (draws // chunk)
                ]
                sums = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                for right in (1, 0):
                    key = {"failures": failures, "estimator": label, "handling": handling, "right": bool(right)}
                    yield key | summarise(sums, right)


def rounded(entry: Any) -> Any:
    """Round all numbers to six digits."""
    if isinstance(entry, dict):
        return {key: rounded(value) for key, value in entry.items()}
    if isinstance(entry, list | tuple):
        return [rounded(value) for value in entry]
    return float(f"{entry:.6g}") if isinstance(entry, float) else entry


def main() -> None:
    from benchmarks.masking.bias_figures import draw_figures, table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=0.5, help="probability that a reward which may fail does")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replot", action="store_true", help="compute nothing; draw what is in the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.replot:
        result = list(results(load(HERE / "groups.json"), arguments.draws, arguments.share, arguments.seed))
        lines = ",\n".join(json.dumps(rounded(entry)) for entry in result)
        RESULTS.write_text(f"[\n{lines}\n]\n")
    entries = msgspec.json.decode(RESULTS.read_bytes())
    print(table(entries))
    draw_figures(entries)


if __name__ == "__main__":
    main()
