"""Advantages, masks, aggregation and loss of whole batches, compared to a baseline of the same run.

    python -m benchmarks.advantages [--rounds 15] [--json] [--check]

Batches of 65,536 rows x 64 tokens and of 4,096 x 1,024, one row per completion, in interleaved groups of 8 and 16 with
string ids; a tenth of the rewards are unmeasured and NaN. Baselines: copying the rewards once in torch, summing the
batch's tokens (float32) once, and plain Python loops group by group. Estimators get coded ids; building the `Grouping`
counts towards their time. `--check` exits with 1 if a limit is exceeded: 8 token sums for an estimator with one value
per row, gdpo 8 per part; a row's advantage on its tokens must be a view. Cost per row is measured up to 1,048,576 rows.

Method: one thread and its CPU time, because wall time on a shared machine depends on other processes. Medians over
rounds; each round measures every entry in another order, entries without a limit every third round. The garbage
collector is off. Ids are new strings in each round, so their hashes are not cached.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, get_args

import torch
from torch import Tensor

from workers import settings
from workers.settings.loss_options import Clipped
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.aggregation import AGGREGATIONS, BatchTotals, row_factors
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.losses import LossInputs, policy_loss
from workers.train.algorithms.masks import NONE, CompletionFacts, Masks, derive_masks
from workers.train.algorithms.normalization import normalize, normalize_tokens, whiten
from workers.train.algorithms.sequences import Sequences
from workers.train.step.batch import Batch
from workers.train.step.branches import BranchFacts
from workers.train.step.estimation import estimate_advantages

SHAPES: Final = ((65_536, 64), (4_096, 1_024))
GROUP_SIZES: Final = (8, 16)
ROWS: Final = (65_536, 262_144, 1_048_576)
"""Rows of the batches that show how cost grows; they have no tokens."""
GROWTH_LIMIT: Final = 2.5
"""Time of a row in the largest of them by that in the smallest; a cost that grew with the square would have 16."""
GROWING: Final = ("grpo", "rloo", "opo", "passk", "max_rl", "reinforce_plus_plus_baseline", "gdpo")
ESTIMATOR_LIMIT: Final = 8.0
"""In sums of the batch's tokens."""
PARTS: Final = 3
CHOICES: Final = {kind().name: kind() for kind in get_args(settings.Estimator)}
"""Estimators of the settings by name, with the defaults of their options."""
NORMALIZATION: Final = {"leave_one_out": False, "unbiased": True, "epsilon": 1e-5}
TOKEN_SUM: Final = "floor: tokens summed"
LOOPED: Final = ("grpo", "rloo")
"""Estimators that are written out as loops below, to compare."""


@dataclass(frozen=True)
class TimedWork:
    """Times `work(prepare())`; `prepare` is not timed."""

    name: str
    work: Callable[[Any], object]
    limit: float | None = None
    """At most so many token sums."""
    parts: int = 1
    """The limit is of each of them."""
    seldom: bool = False
    prepare: Callable[[], Any] = lambda: None


def alone(work: Callable[[], object]) -> Callable[[Any], object]:
    """Wrap work without preparation."""
    return lambda _: work()


class Rows:
    """A batch without its tokens, for estimators with one value per row."""

    def __init__(self, rows: int, size: int) -> None:
        self.rng = torch.Generator().manual_seed(rows + size)
        self.rows, self.groups = rows, rows // size
        self._ids = [f"train:0:{place // size}".encode() for place in range(rows)]
        random.Random(rows + size).shuffle(self._ids)
        codes: dict[str, int] = {}
        self.codes_C = torch.tensor([codes.setdefault(name, len(codes)) for name in self.ids()])
        self.valid_C = torch.rand(rows, generator=self.rng) >= 0.1
        self.rewards_C = torch.where(self.valid_C, self._scores(rows), torch.nan)
        lengths = torch.randint(1, 64, (rows,), generator=self.rng) * self.valid_C
        self.parts_PC = torch.where(self.valid_C, self._scores(PARTS, rows), torch.nan)
        self.inputs = {
            "rewards_C": self.rewards_C,
            "lengths_C": lengths,
            "loss_lengths_C": lengths,
            "parts_PC": self.parts_PC,
            "has_part_PC": torch.ones_like(self.parts_PC, dtype=torch.bool),
            "part_weights_P": torch.ones(PARTS, dtype=torch.float64),
            "correct_C": self.rewards_C >= 1,
        }

    def ids(self) -> list[str]:
        """Return new strings, as in records just decoded."""
        return [name.decode() for name in self._ids]

    def _scores(self, *shape: int) -> Tensor:
        return torch.randint(0, 5, shape, generator=self.rng).double() / 4

    def grouping(self) -> Grouping:
        return Grouping(self.codes_C, self.valid_C, self.groups)

    def estimate(self, name: str) -> Any:
        """Run a registered estimator with its default options and a new grouping."""
        return ESTIMATORS[name]({**self.inputs, "groups": self.grouping()}, CHOICES[name].options)

    def estimator(self, name: str) -> TimedWork:
        by_token, parts = ESTIMATORS[name].traits.level == "token", "parts_PC" in ESTIMATORS[name].input_names
        return TimedWork(
            name,
            lambda _: self.estimate(name),
            None if by_token else ESTIMATOR_LIMIT,
            parts=PARTS if parts else 1,
            seldom=by_token,
        )


class Tokens(Rows):
    """The whole batch: rows are three quarters full on average and contain tool tokens."""

    def __init__(self, rows: int, tokens: int, size: int) -> None:
        super().__init__(rows, size)
        place, self.rows_R = torch.arange(tokens), torch.arange(rows)
        full = torch.randint(tokens // 2, tokens + 1, (rows,), generator=self.rng)
        tool = (place >= tokens // 4) & (place < tokens // 4 + tokens // 8)
        self.sampled_RT = (place < full.unsqueeze(1)) & ~tool & (place > 0)
        self.logprobs_RT = -torch.rand(rows, tokens, generator=self.rng)
        self.old_RT = self.logprobs_RT + 0.1 * torch.randn(rows, tokens, generator=self.rng)
        none, zeros = torch.full((rows,), NONE), torch.zeros(rows, tokens)
        self.batch = Batch(
            tokens_RT=zeros.long(),
            sampled_RT=self.sampled_RT,
            rollout_logprobs_RT=self.old_RT,
            versions_RT=zeros.int(),
            lengths_R=full,
            completion_ids_R=self.rows_R,
            facts=CompletionFacts(
                group_ids_C=self.codes_C,
                num_groups=self.groups,
                rewards_C=self.rewards_C,
                measured_C=self.valid_C,
                reward_reason_C=none,
                rollout_reason_C=none,
                truncation_reason_C=none,
                drop_reason_C=none,
                turns_C=torch.ones_like(none),
            ),
            branches=BranchFacts.unbranched(rows, rows),
            prompt_ids=(),
            greedy_rewards_G=torch.zeros(self.groups, dtype=torch.float64),
            greedy_measured_G=torch.zeros(self.groups, dtype=torch.bool),
            greedy_lengths_G=torch.zeros(self.groups, dtype=torch.int64),
            greedy_truncated_G=none[: self.groups],
            part_keys=tuple((str(part), 1.0) for part in range(PARTS)),
            parts_PC=self.parts_PC,
            has_part_PC=torch.ones_like(self.parts_PC, dtype=torch.bool),
            part_weights_P=self.inputs["part_weights_P"],
            turn_rewards_RT=zeros.double(),
        )
        self.masks = self.derive()
        self.mask_RT, self.lengths_C = self.masks.loss_tokens_RT, self.masks.loss_tokens_RT.sum(dim=1)
        self.inputs |= {
            "lengths_C": self.lengths_C,
            "loss_lengths_C": self.lengths_C,
            "token_rewards_CT": self.logprobs_RT,
            "mask_CT": self.mask_RT,
            "values_CT": self.old_RT,
            "bootstrap_C": torch.zeros(rows),
            "greedy_C": torch.zeros(rows),
            "old_logprobs_CT": self.logprobs_RT,
            "sum_pi_squared_CT": self.logprobs_RT.exp(),
            "weights_CT": torch.ones(rows, tokens),
        }
        self.advantages_RT = self.estimate("rloo").unsqueeze(1).expand(rows, tokens)
        self.totals = BatchTotals(int(self.mask_RT.sum()), int(self.masks.loss_C.sum()))

    def derive(self) -> Masks:
        return derive_masks(self.batch.facts, self.rows_R, self.sampled_RT, truncation={})

    def advantages(self, name: str) -> Tensor:
        """Return advantages on tokens, as in the trainer."""
        chosen = settings.Settings(
            model=settings.ModelSettings(path=""), data=settings.DataSettings(path=""), estimator=CHOICES[name]
        )
        return estimate_advantages(self.batch, self.masks, chosen).tokens_RT

    def loss(self) -> Tensor:
        """Run the clipped loss, forward and backward."""
        logprobs = self.logprobs_RT.detach().requires_grad_()
        result = policy_loss(
            "clipped",
            LossInputs(
                logprobs_RT=logprobs,
                proximal_RT=self.old_RT,
                advantages_RT=self.advantages_RT,
                sequences=Sequences(self.mask_RT, self.rows_R),
            ),
            row_factors("token-mean", self.lengths_C, self.totals),
            Clipped().options,
        )
        return torch.autograd.grad(result.loss, logprobs)[0]

    def normalize(self, level: str) -> Any:
        return normalize(self.rewards_C, self.grouping(), mean=level, std=level, **NORMALIZATION)

    def normalize_tokens(self, level: str) -> Any:
        masks = self.mask_RT, self.codes_C
        return normalize_tokens(self.advantages_RT, *masks, mean=level, std=level, **NORMALIZATION)

    def lines(self) -> list[TimedWork]:
        into = torch.empty_like(self.rewards_C)
        by_level = sorted(ESTIMATORS, key=lambda name: ESTIMATORS[name].traits.level)
        work_by_name: dict[str, Callable[[], object]] = {
            "normalize, group": partial(self.normalize, "group"),
            "normalize, batch": partial(self.normalize, "batch"),
            "normalize_tokens, group": partial(self.normalize_tokens, "group"),
            "normalize_tokens, batch": partial(self.normalize_tokens, "batch"),
            "whiten, tokens": partial(whiten, self.advantages_RT, self.mask_RT),
            "masks.derive": self.derive,
            "estimate_advantages, grpo on tokens": partial(self.advantages, "grpo"),
            **{f"factors, {name}": partial(row_factors, name, self.lengths_C, self.totals) for name in AGGREGATIONS},
            "clipped loss, forward and backward": self.loss,
        }
        return [
            TimedWork("floor: rewards copied", lambda _: into.copy_(self.rewards_C)),
            TimedWork(TOKEN_SUM, lambda _: self.logprobs_RT.sum()),
            *(self.estimator(name) for name in by_level),
            *(TimedWork(looped(name), partial(self.loop, name), seldom=True, prepare=self.ids) for name in LOOPED),
            *(TimedWork(name, alone(work), seldom=True) for name, work in work_by_name.items()),
        ]

    def loop(self, name: str, ids: Sequence[str]) -> Tensor:
        """Run the estimator as a Python loop over groups of floats."""
        members: dict[str, list[int]] = {}
        for place, (group, valid) in enumerate(zip(ids, self.valid_C.tolist(), strict=True)):
            if valid:
                members.setdefault(group, []).append(place)
        rewards, advantages = self.rewards_C.tolist(), [0.0] * self.rows
        for places in members.values():
            count = len(places)
            if count == 1:
                continue
            mean = sum([rewards[place] for place in places]) / count
            if name == "rloo":
                scale = count / (count - 1)
            else:
                squares = sum([(rewards[place] - mean) ** 2 for place in places])
                scale = 1 / ((squares / (count - 1)) ** 0.5 + CHOICES["grpo"].options["epsilon"])
            for place in places:
                advantages[place] = (rewards[place] - mean) * scale
        return torch.tensor(advantages, dtype=torch.float64)


def looped(name: str) -> str:
    return f"{name} in a Python loop"


def is_view(on_tokens: Tensor) -> bool:
    """Return whether memory holds only one number per row."""
    stored = on_tokens.untyped_storage().nbytes() // on_tokens.element_size()
    return on_tokens.stride(1) == 0 and stored == len(on_tokens)


def measure(lines: Sequence[TimedWork], rounds: int) -> dict[str, list[float]]:
    """Return CPU milliseconds of each entry, in ascending order."""
    result: dict[str, list[float]] = {line.name: [] for line in lines}
    order, shuffled = list(lines), random.Random(rounds)
    gc.collect()
    gc.disable()
    for turn in range(-1, rounds):  # the first one warms up
        shuffled.shuffle(order)
        for line in order:
            if line.seldom and turn % 3:
                continue
            given = line.prepare()
            began = time.thread_time_ns()
            line.work(given)
            spent = time.thread_time_ns() - began
            if turn >= 0:
                result[line.name].append(spent / 1e6)
    gc.enable()
    return {name: sorted(times) for name, times in result.items()}


def case(rows: int, tokens: int, size: int, rounds: int) -> dict[str, Any]:
    """Measure every entry on one batch."""
    batch = Tokens(rows, tokens, size)
    for name in LOOPED:
        torch.testing.assert_close(batch.loop(name, batch.ids()), batch.estimate(name))
    by_row = [name for name in ESTIMATORS if ESTIMATORS[name].traits.level == "completion"]
    copied = [name for name in by_row if not is_view(batch.advantages(name))]
    lines = batch.lines()
    times = measure(lines, rounds)
    medians = {name: statistics.median(result) for name, result in times.items()}
    timings = []
    for line in lines:
        sums = medians[line.name] / line.parts / medians[TOKEN_SUM]
        result = times[line.name]
        timings.append(
            {
                "line": line.name,
                "ms": round(medians[line.name], 4),
                "ms_quartiles": [round(result[len(result) // 4], 4), round(result[len(result) * 3 // 4], 4)],
                "token_sums": round(sums, 3),
                "parts": line.parts,
                "limit": line.limit,
                "within_limits": None if line.limit is None else sums <= line.limit,
            }
        )
    return {
        "rows": rows,
        "tokens": tokens,
        "group_size": size,
        "lines": timings,
        "python_loop": {
            name: {
                "times_estimator": round(medians[looped(name)] / medians[name], 1),
            }
            for name in LOOPED
        },
        "advantages_on_tokens": {"copied": copied, "within_limits": not copied},
    }


def growth(rounds: int) -> list[dict[str, Any]]:
    """Return nanoseconds per row for growing batches."""
    lines = []
    for rows in ROWS:
        batch = Rows(rows, GROUP_SIZES[0])
        lines += [replace(line, name=f"{line.name} {rows}") for line in map(batch.estimator, GROWING)]
    times, rows_of_growth = measure(lines, rounds), []
    for name in GROWING:
        by_rows = {rows: statistics.median(times[f"{name} {rows}"]) * 1e6 / rows for rows in ROWS}
        ratio = by_rows[ROWS[-1]] / by_rows[ROWS[0]]
        rows_of_growth.append(
            {
                "line": name,
                "ns_per_row": {str(rows): round(spent, 1) for rows, spent in by_rows.items()},
                "ratio": round(ratio, 2),
                "limit": GROWTH_LIMIT,
                "within_limits": ratio <= GROWTH_LIMIT,
            }
        )
    return rows_of_growth


def show(result: dict[str, Any]) -> None:
    """Print tables."""
    marks = {None: "", True: "yes", False: "no"}
    for reported in result["cases"]:
        print(f"{reported['rows']:,} rows x {reported['tokens']:,} tokens, groups of {reported['group_size']}")
        print(f"  {'':36} {'ms':>9} {'quartiles':>19} {'token sums':>11} {'limit':>6}  within limits")
        for line in reported["lines"]:
            low, high = line["ms_quartiles"]
            each = " each of 3" if line["parts"] > 1 else ""
            print(
                f"  {line['line']:36} {line['ms']:9.3f} {low:9.3f} {high:9.3f} {line['token_sums']:11.2f}"
                f" {line['limit'] or '':>6}  {marks[line['within_limits']]}{each}"
            )
        view = reported["advantages_on_tokens"]
        print(
            f"  {'a row on its tokens is a view':36} {'':48} {marks[view['within_limits']]} {' '.join(view['copied'])}"
        )
        for name, found_ in reported["python_loop"].items():
            print(f"  {looped(name)} takes {found_['times_estimator']} times as long as {name}")
    print(
        f"{'nanoseconds of a row, by rows':32}" + "".join(f"{rows:>11,}" for rows in ROWS) + "   ratio  limit  within"
    )
    for line in result["growth"]:
        spent = "".join(f"{value:11.1f}" for value in line["ns_per_row"].values())
        print(
            f"  {line['line']:30}{spent} {line['ratio']:7.2f} {line['limit'] or '':>6}  {marks[line['within_limits']]}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case(rows, tokens, size, arguments.rounds) for rows, tokens in SHAPES for size in GROUP_SIZES]
    result: dict[str, Any] = {"rounds": arguments.rounds, "cases": cases, "growth": growth(arguments.rounds)}
    checked = [entry for one in cases for entry in (*one["lines"], one["advantages_on_tokens"])] + result["growth"]
    result["within_limits"] = all(entry["within_limits"] is not False for entry in checked)
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)
    return 1 if arguments.check and not result["within_limits"] else 0


if __name__ == "__main__":
    sys.exit(main())
