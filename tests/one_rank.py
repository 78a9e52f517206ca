"""Steps shared by several processes: `python tests/one_rank.py FOLDER SIZE ...`; a test starts it.

For each number of ranks SIZE and each case, the ranks train the model in FOLDER/base on a batch that may have fewer
valid completions than there are ranks. Every rank writes its results to FOLDER/RANK-of-SIZE.pt.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from stream.errors import SettingsError
from stream.records import Branch, BranchRole, Completion, DiscardReason, Group, Prompt
from stream.validity import Measured, RewardReason, Unmeasured
from tests.cases.rows import sampled_row
from tests.forked import ended, fork, import_ahead
from workers.settings.toml_file import parse_settings
from workers.train.model.logprobs import LogprobModel
from workers.train.ranks import Ranks
from workers.train.step import model_runner
from workers.train.step.batch import collate
from workers.train.step.learner import Learner

CASES = {
    "clipped": {},
    "gspo, two passes": {"loss": {"name": "gspo"}, "train": {"updates_per_batch": 2}},
    "gae": {"estimator": {"name": "gae"}},
    "divergence": {"algorithm": {"kl_coefficient": 0.1}},
    "kl_cov": {"loss": {"name": "kl_cov", "kl_cov_ratio": 0.2}},
    "rejection, normalised weights": {
        "correction": {"weights": "token-normalized", "reject": {"seq_mean_k1": [0.01, 100.0]}},
        "filter": {"min_valid_rows": 2},
    },
    "rows apart": {"train": {"share_history": "off", "micro_batch_tokens": 100}},
    "rows as trees": {"train": {"share_history": "on", "micro_batch_tokens": 100}},
    "branches": {"train": {"updates_per_batch": 2}, "algorithm": {"aggregation": "token-mean"}},
}


def completion(index: int, tokens: list[int], reward: float | None) -> Completion:
    row = sampled_row(tokens, [-3.0 - 0.1 * (i % 3) for i in range(len(tokens))], version=3)
    known = Unmeasured(RewardReason.RAISED) if reward is None else Measured(reward)
    return Completion(index=index, rows=[row], reward=known)


def branch(completion: Completion) -> None:
    """Give a completion a sub-branch, which weakens its tokens, and a discarded one."""
    completion.rows += [sampled_row([7 + i, 8, 9], [-3.2] * 3, version=3) for i in range(2)]
    completion.branches = [
        Branch(role=BranchRole.MAIN, rows=(0,)),
        Branch(role=BranchRole.SUB, rows=(1,)),
        Branch(role=BranchRole.SIDE, rows=(2,), discarded=DiscardReason.ROLE),
    ]


def groups(*, empty: bool, branched: bool) -> list[Group]:
    """Two completions of different lengths that count, and some that do not; with `empty`, none that counts."""
    rewards = [None] * 4 if empty else [1.0, None, 0.25, None]
    rolled = [completion(i, list(range(3 + i, 5 + 2 * i)), reward) for i, reward in enumerate(rewards)]
    if branched:
        branch(rolled[0])
    return [Group(prompt=Prompt(id="p", messages=[]), completions=rolled)]


def train(base: Path, case: str) -> dict[str, object]:
    """Train two steps, most with one completion per micro-batch, and a third with nothing valid; returns results."""
    sections = dict(CASES[case])
    train = {"micro_batch_tokens": 1, "learning_rate": 1e-2, "max_grad_norm": 1e9} | sections.pop("train", {})
    least = {"model": {"path": str(base)}, "data": {"path": "none"}, "environments": {"a": "calculator"}}
    learner = Learner(parse_settings(least | {"train": train} | sections))
    batches = [collate(groups(empty=empty, branched=case == "branches")) for empty in (False, False, True)]
    reports = [learner.step(batch, 3) for batch in batches]
    named = dict(learner.model.named_parameters()) | learner.critic_parameters
    return {
        "weights": {name: whole(parameter.detach()) for name, parameter in named.items()},
        "metrics": [{k: v for k, v in report.metrics.items() if k != "seconds"} for report in reports],
        "skipped": [report.skipped for report in reports],
        "parts": sum(part is not None for part in learner.ranks.local_batches([torch.zeros(1)] * 2)),
    }


def refusal(rank: int, name: str) -> str:
    """Return the error of a step on ranks of which only rank 0 lays out rows so, as different devices would.

    Args:
        rank: this one.
        name: the field of `LogprobModel` that only rank 0 sets.
    """
    settings = parse_settings({"model": {"path": "m"}, "data": {"path": "d"}, "environments": {"a": "calculator"}})
    model_runner.set_attention = lambda model, *_: model._replace(**{name: rank == 0})
    try:
        model_runner.ModelRunner(LogprobModel(torch.nn.Linear(1, 1), None), None, None, settings, Ranks())
    except SettingsError as error:
        return str(error)
    return ""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def be(folder: Path, rank: int, size: int) -> int:
    """Run one rank of `size`; returns the exit code."""
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{size}", rank=rank, world_size=size)
    results = {case: train(folder / "base", case) for case in CASES}
    if size > 1:
        results["refusals"] = {name: refusal(rank, name) for name in ("packed", "can_share")}
    torch.save(results, folder / f"{rank}-of-{size}.pt")
    if size > 1:
        dist.destroy_process_group()
    return 0


def main() -> int:
    """Run all ranks, for each number of them in turn."""
    folder, sizes = Path(sys.argv[1]), map(int, sys.argv[2:])
    import_ahead()
    for size in sizes:
        ranks = [fork(partial(be, folder, rank, size)) for rank in range(size)]
        if codes := [code for code in map(ended, ranks) if code]:
            return codes[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
