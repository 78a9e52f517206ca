"""Branches of agents' rollouts in the trainer: facts, masks, weights, metrics, and what a model learns from them."""

import pytest
import torch

from stream.errors import RecordError
from stream.records import Branch, BranchRole, Completion, DiscardReason
from stream.validity import RewardReason, TruncationReason, Unmeasured
from tests.cases.groups import completion, group
from tests.cases.models import loaded_once, write_small_qwen3
from tests.cases.norms import exact_norms
from tests.cases.rows import sampled_row
from workers.runs.tokens import rejected_tokens
from workers.settings.toml_file import parse_settings
from workers.train.algorithms.aggregation import branch_weights
from workers.train.algorithms.masks import NONE
from workers.train.step.batch import collate
from workers.train.step.estimation import ShapedRewards, estimate_advantages
from workers.train.step.group_checks import check_group, mask_batch
from workers.train.step.learner import Learner
from workers.train.step.step_metrics import step_metrics

MAIN, SUB, COMPACT, SIDE, OTHER = BranchRole
ROLE, PROGRAM, SUPERSEDED = DiscardReason
LEAST = {"model": {"path": "m"}, "data": {"path": "d"}, "environments": {"a": "calculator"}}
VOCABULARY = 24


def agent(index, reward, *branches, tokens=2):
    """Return a completion with one row for each branch, of different tokens.

    Args:
        index: within its group.
        reward: measured, or a reason.
        branches: role, or role and why it is discarded.
        tokens: sampled in each row.
    """
    found = []
    for at, each in enumerate(branches):
        role, reason = each if isinstance(each, tuple) else (each, None)
        found.append(Branch(role=role, rows=(at,), discarded=reason))
    made = completion(index, reward, branches=found, turns=len(found))
    made.rows = [
        sampled_row([3 + (5 * at + index + i) % 20 for i in range(tokens)], [-3.0] * tokens, version=3, prompt=[1, 2])
        for at in range(len(branches))
    ]
    return made


def settings_of(**sections):
    return parse_settings(LEAST | {"filter": {"min_valid_rows": 1}} | sections)


def test_facts_of_branches_come_from_the_records():
    compacted = [
        Branch(role=MAIN, rows=(1, 2)),
        Branch(role=COMPACT, rows=(0,), parent=0, after_turn=2),
        Branch(role=MAIN, rows=(3,), parent=1),
        Branch(role=MAIN, parent=2),
        Branch(role=MAIN, parent=0, after_turn=1),
        Branch(role=SUB, parent=0),
    ]
    first = agent(0, 1.0, MAIN, MAIN, MAIN, MAIN)
    first.branches = compacted
    made = [first, agent(1, 0.0, (SIDE, ROLE)), completion(2, 0.5)]
    facts = collate([group(*made)]).branches
    assert facts.numbers_R.tolist() == [1, 0, 0, 2, 0, 0]
    assert facts.roles_CW.tolist() == [[0, 2, 0, 0, 0, 1], [3] + [NONE] * 5, [NONE] * 6]
    assert facts.discarded_CW.tolist() == [[NONE] * 6, [0] + [NONE] * 5, [NONE] * 6]
    assert facts.compactions_C.tolist() == [2, 0, 0]
    assert facts.branched_C.tolist() == [True, True, False]


@pytest.mark.parametrize("rows", [(), (0, 0), (1,), (0, 1)])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_row_that_is_not_of_one_branch_is_refused(rows, greedy):
    bad = completion(7, 1.0, branches=[Branch(role=MAIN, rows=rows)], greedy=greedy)
    with pytest.raises(RecordError, match="group train:3, completion 7: its 1 rows are not of one branch each"):
        collate([group(completion(0, 1.0), bad, name="train:3")])


def test_tokens_of_discarded_branches_are_rejected_for_the_reason_whatever_else_is_wrong_with_them():
    old = agent(0, 1.0, MAIN, (SIDE, ROLE), (SUB, PROGRAM), (MAIN, SUPERSEDED), SUB)
    batch = collate([group(old, completion(1, 0.0, version=3))])
    masks = mask_batch(batch, settings_of(pacing={"max_token_age": 1}), 9)
    assert masks.rules == ("no_token", "branch_role", "branch_program", "branch_superseded", "too_old", "not_finite")
    blamed = [masks.rules[code] for code in masks.token_rejected_by_RT.amax(dim=1)]
    assert blamed == ["too_old", "branch_role", "branch_program", "branch_superseded", "too_old", "too_old"]
    masks = mask_batch(batch, settings_of(), 3)
    assert (
        masks.loss_tokens_RT.sum(dim=1).tolist() == masks.baseline_tokens_RT.sum(dim=1).tolist() == [2, 0, 0, 0, 2, 2]
    )
    assert masks.baseline_C.tolist() == masks.loss_C.tolist() == [True, True]


def test_a_completion_whose_branches_are_all_discarded_leaves_the_baseline_with_its_reason():
    lost = agent(2, 8.0, (SIDE, ROLE), (MAIN, SUPERSEDED))
    made = group(agent(0, 1.0, MAIN, SUB), agent(1, 0.0, MAIN), lost)
    checked = check_group(made, settings_of(), 3, VOCABULARY)
    assert checked.states == ["valid", "valid", "rejected:branch_superseded"]
    assert checked.without_loss == {"rejected:branch_superseded": 1}
    masks = mask_batch(checked.batch, settings_of(), 3)
    assert masks.rewards_C.tolist() == [1.0, 0.0, 0.0]
    advantages = estimate_advantages(checked.batch, masks, settings_of(estimator={"name": "rloo"}))
    assert advantages.values_C.tolist() == [1.0, -1.0, 0.0]


def test_the_rules_of_a_batch_without_branches_are_the_usual_ones():
    batch = collate([group(completion(0, 1.0), agent(1, 0.0, MAIN, SUB))])
    assert mask_batch(batch, settings_of(), 3).rules == ("no_token", "too_old", "not_finite")


@pytest.mark.parametrize(
    ("tokens", "main", "weight"),
    [
        ([6, 0, 0], [True, False, False], 1.0),
        ([6, 3, 3], [True, False, False], 0.5),
        ([6, 3, 3], [True, False, True], 0.75),
        ([1, 999, 0], [True, False, False], 0.001),
        ([0, 6, 2], [True, False, False], 0.5),  # no main token: as much as 4 tokens, the mean of 6 and 2
        ([0, 0, 7], [True, False, False], 1.0),
        ([0, 0, 0], [True, False, False], 1.0),
    ],
)
def test_weights_of_rollouts_by_hand(tokens, main, weight):
    found = branch_weights(torch.tensor([tokens]), torch.tensor([main]))
    assert found.dtype == torch.float64
    assert found.tolist() == [weight]


def test_the_penalty_for_length_is_for_the_longest_branch_that_is_trained():
    """`rollout.max_tokens` holds for each branch: many short ones are no long answer."""
    settings = settings_of(
        rollout={"max_tokens": 4, "max_tokens_per_turn": 4}, algorithm={"overlong_penalty": [2, 1.0]}
    )
    long = agent(1, 1.0, MAIN, (SIDE, ROLE))
    long.rows = [sampled_row([3] * n, [-1.0] * n, version=3) for n in (3, 9)]
    of_two_rows = agent(2, 1.0, MAIN, MAIN)
    of_two_rows.branches = [Branch(role=MAIN, rows=(0, 1))]
    greedy = agent(4, 1.0, MAIN, SUB, tokens=3)
    greedy.greedy = True
    made = group(agent(0, 1.0, MAIN, SUB, SUB, SUB), long, of_two_rows, completion(3, 1.0, [3, 4, 5]), greedy)
    batch = collate([made])
    shaped = ShapedRewards(batch, mask_batch(batch, settings, 3), settings)
    assert shaped.rewards_C.tolist() == [1.0, 0.5, 0.0, 0.5]
    assert batch.greedy_lengths_G.tolist() == [3]


def test_metrics_count_branches_by_role_and_discarded_tokens_by_reason():
    compacted = [
        Branch(role=MAIN, rows=(0,)),
        Branch(role=COMPACT, rows=(1,), parent=0, after_turn=1),
        Branch(role=MAIN, rows=(2,), parent=1),
    ]
    first = agent(0, 1.0, MAIN, MAIN, MAIN)
    first.branches = compacted
    invalid = agent(2, Unmeasured(RewardReason.RAISED), SUB, SUB, (SIDE, ROLE))
    made = group(first, agent(1, 0.0, MAIN, SUB, (SIDE, ROLE), (MAIN, SUPERSEDED)), invalid, completion(3, 0.0, [5, 6]))
    batch, settings = collate([made]), settings_of()
    metrics = step_metrics(batch, mask_batch(batch, settings, 3), torch.zeros(4), settings=settings, version=3)
    assert {n: v for n, v in metrics.items() if n.startswith(("branches/", "tokens/branch"))} == {
        "tokens/branch_role": 4,
        "tokens/branch_superseded": 2,
        "branches/discarded/role": 4 / 22,
        "branches/discarded/superseded": 2 / 22,
        "branches/role/main": 2.0,
        "branches/role/sub": 0.5,
        "branches/role/compact": 0.5,
        "branches/role/side": 0.5,
        "branches/compactions": 0.5,
    }
    assert (metrics["tokens/sampled"], metrics["tokens/loss"], metrics["rows/valid"]) == (22, 12, 3)


def test_without_branches_there_is_no_metric_of_them():
    batch, settings = collate([group(completion(0, 1.0), completion(1, 0.0))]), settings_of()
    metrics = step_metrics(batch, mask_batch(batch, settings, 3), torch.zeros(2), settings=settings, version=3)
    assert not [name for name in metrics if "branch" in name]


# With a model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with loaded_once():
        yield write_small_qwen3(tmp_path_factory.mktemp("base"), VOCABULARY, layers=2, tied=False)


def learner(base, *, train=None, dtype=torch.float64, **sections):
    own = {"learning_rate": 1e-3, "max_grad_norm": 1e9} | (train or {})
    return Learner(parse_settings(LEAST | {"model": {"path": str(base)}, "train": own} | sections), dtype=dtype)


def weights(trained):
    named = trained.parameters | trained.critic_parameters
    return torch.cat([p.detach().flatten().clone() for p in named.values()])


def trained_and_discarded(reason=ROLE):
    """Return two groups with discarded branches."""
    first = [agent(0, 1.0, MAIN, (SIDE, reason), SUB), agent(1, 0.0, (MAIN, reason), MAIN), agent(2, 0.5, MAIN, SUB)]
    return [group(*first), group(agent(0, 0.0, (SIDE, reason), MAIN, SUB, SUB), agent(1, 1.0, MAIN), name="q")]


def without_discarded(groups):
    """Return the groups without the rows of discarded branches."""
    return [group(*map(_without_discarded, each.completions), name=each.prompt.id) for each in groups]


def _without_discarded(made):
    kept = [branch for branch in made.branches if branch.discarded is None]
    rows = [made.rows[row] for branch in kept for row in branch.rows]
    branches = [Branch(role=branch.role, rows=(at,)) for at, branch in enumerate(kept)]
    return Completion(index=made.index, rows=rows, branches=branches, reward=made.reward, turns=made.turns)


@pytest.mark.models
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"estimator": {"name": "gae"}, "algorithm": {"kl_coefficient": 0.1}},
        {"loss": {"name": "gspo"}, "train": {"updates_per_batch": 2}},
        {
            "correction": {"weights": "token-normalized", "reject": {"seq_mean_k2": [0.0, 9.0]}},
            "filter": {"min_valid_rows": 2},
        },
    ],
    ids=["defaults", "critic and reference", "gspo, two updates", "correction"],
)
def test_a_model_learns_nothing_from_discarded_rows_and_does_not_read_them(base, sections):
    groups = trained_and_discarded()
    one, other, all_trained = (learner(base, dtype=torch.float32, **sections) for _ in range(3))
    report, expected = one.step(collate(groups), 3), other.step(collate(without_discarded(groups)), 3)
    assert report.trained
    assert torch.equal(weights(one), weights(other))
    assert report.loss == pytest.approx(expected.loss, rel=1e-12)
    for name in ("tokens/loss", "tokens/forwarded", "tokens/shared", "grad_norm", "entropy"):
        assert report.metrics[name] == expected.metrics[name], name
    assert report.metrics["tokens/sampled"] - report.metrics["tokens/branch_role"] == report.metrics["tokens/loss"]
    every = [agent(c.index, c.reward, *(branch.role for branch in c.branches)) for c in groups[0].completions]
    all_trained.step(collate([group(*every), groups[1]]), 3)
    assert not torch.equal(weights(all_trained), weights(one))


@pytest.mark.models
def test_the_archive_says_which_tokens_a_branch_lost_and_why(base):
    made = group(agent(0, 1.0, MAIN, (SIDE, PROGRAM)), agent(1, 0.0, MAIN), agent(2, 1.0, (MAIN, SUPERSEDED)))
    first, second, third = learner(base).step(collate([made]), 3).completions["p"]
    assert (first.state, first.loss_tokens, second.loss_tokens) == ("valid", 2, 2)
    assert (third.state, third.loss_tokens, third.advantage) == ("rejected:branch_superseded", 0, None)
    kept, discarded = first.rows
    assert (kept.loss_mask, kept.rejected_by, kept.rules) == (b"", b"", ())
    assert (discarded.loss_mask, discarded.rejected_by, discarded.rules) == (bytes(2), b"\1\1", ("branch_program",))
    assert (discarded.advantages, discarded.logprob_differences) == (b"", b"")
    assert [rejected_tokens(each) for each in (first, third)] == [{"branch_program": 2}, {"branch_superseded": 2}]


LAYOUTS = {
    "a completion each": {"micro_batch_tokens": 1, "share_history": "off"},
    "packed": {"packing": "on", "attention": "varlen", "share_history": "off"},
    "as trees": {"share_history": "on"},
    "as trees, cut": {"share_history": "on", "micro_batch_tokens": 8},
}


@pytest.mark.models
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_rollouts_are_those_of_the_whole_batch_however_rows_are_laid_out(
    base, layout, aggregation, monkeypatch
):
    exact_norms(monkeypatch.setattr)
    algorithm = {"aggregation": aggregation, "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    usual = {"updates_per_batch": 2, "share_history": "off", "micro_batch_tokens": 16384}
    batch = collate(trained_and_discarded())
    one, other = (learner(base, train=usual | own, algorithm=algorithm) for own in ({}, LAYOUTS[layout]))
    report, expected = one.step(batch, 3), other.step(batch, 3)
    assert report.loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-12)
    assert (weights(one) - weights(other)).abs().max() < 1e-9
    by_tokens = learner(base, train=usual, algorithm=algorithm, agents={"weight": "tokens"})
    assert by_tokens.step(batch, 3).loss != pytest.approx(report.loss, rel=0.1)


def test_truncation_policies_and_discards_go_together():
    cut = agent(0, 1.0, MAIN, (SIDE, ROLE))
    cut.truncated = TruncationReason.LENGTH
    batch = collate([group(cut, agent(1, 0.0, MAIN), agent(2, 1.0, MAIN))])
    for policy, in_baseline, in_loss in (("baseline_only", 2, 0), ("zero_reward", 0, 2), ("exclude", 0, 0)):
        masks = mask_batch(batch, settings_of(algorithm={"truncation": {"length": policy}}), 3)
        assert masks.baseline_tokens_RT.sum(dim=1).tolist() == [in_baseline, 0, 2, 2]
        assert masks.loss_tokens_RT.sum(dim=1).tolist() == [in_loss, 0, 2, 2]
