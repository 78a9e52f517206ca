"""Rows as the prefix tree that they share: the same log-probs, gradients and weights as rows apart."""

from array import array

import pytest
import torch

from stream.records import Completion, Group, Prompt, Row, Span
from stream.validity import Measured
from tests.cases.models import loaded_once, write_small_qwen3
from tests.cases.norms import exact_norms
from tests.unit.test_every_algorithm import CASES, completion, group
from workers.settings.toml_file import parse_settings
from workers.train.step import micro_batches
from workers.train.step.batch import collate
from workers.train.step.learner import Learner

VOCABULARY = 24
LORA = {"rank": 4, "alpha": 8.0}
KL = {"kl_coefficient": 0.1}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with loaded_once():
        yield write_small_qwen3(tmp_path_factory.mktemp("base"), VOCABULARY, layers=2, tied=False)


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch):
    exact_norms(monkeypatch.setattr)


def learner(base, share, *, dtype=torch.float64, train=None, model=None, **sections):
    least = {"data": {"path": "none"}, "environments": {"a": "calculator"}}
    own = {"learning_rate": 1e-3, "max_grad_norm": 1e9, "share_history": share} | (train or {})
    settings = least | {"model": {"path": str(base)} | (model or {}), "train": own} | sections
    return Learner(parse_settings(settings), dtype=dtype)


def weights(result):
    trained = result.parameters | result.critic_parameters
    return torch.cat([p.detach().flatten() for p in trained.values()])


def two_groups():
    return [group("p"), group("q", shift=1)]


def branches(name, *, tail=0):
    """Two completions of three rows each: a fork after the first turn, and a row whose first turn was rewritten.

    Their rows have 6, 9, 8 tokens, of which 16 prefixes differ, and both completions begin with the prompt [1, 2].
    """

    def row(prompt, tokens):
        return Row(
            prompt_ids=array("i", prompt).tobytes(),
            token_ids=array("i", tokens).tobytes(),
            sampled_ranges=[(0, len(tokens))],
            logprobs=array("f", [-3.1 - 0.05 * (i % 3) for i in range(len(tokens))]).tobytes(),
            spans=[Span(3, 0, len(tokens))],
        )

    completions = []
    for index in range(2):
        first = [3 + index, 5, 6 + tail]
        rows = [
            row([1, 2], [*first, 7]),
            row([1, 2, *first, 8, 9], [10, 11]),
            row([1, 2, 12, 13, 14], [15, 16 + index, 3]),
        ]
        completions.append(Completion(index=index, rows=rows, reward=Measured(float(index)), turns=3))
    return Group(prompt=Prompt(id=name, messages=[]), completions=completions)


def prefixes(*groups):
    """Return tokens and distinct prefixes of all rows that bear loss."""
    rows = [
        (*array("i", row.prompt_ids), *array("i", row.token_ids))
        for each in groups
        for one in each.completions
        if not one.greedy
        for row in one.rows
    ]
    return sum(map(len, rows)), len({row[: i + 1] for row in rows for i in range(len(row))})


def differences(apart, shared, groups, steps=3):
    """Train both on the same batches; return their last reports, whose metrics must agree."""
    for _ in range(steps):
        one, other = (each.step(collate(groups), 3) for each in (apart, shared))
        assert one.trained
        assert other.trained
        assert one.metrics.keys() == other.metrics.keys()
    for name in one.metrics.keys() - {"seconds", "tokens/forwarded", "tokens/shared"}:
        assert other.metrics[name] == pytest.approx(one.metrics[name], rel=1e-6, abs=1e-9), name
    return one, other


@pytest.mark.parametrize("steps", [3, pytest.param(10, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_ends_with_the_weights_of_rows_apart(base, case, steps):
    apart, shared = (learner(base, share, **CASES[case]) for share in ("off", "on"))
    assert shared.runner.policy.can_share
    one, other = differences(apart, shared, two_groups(), steps)
    assert one.metrics["tokens/forwarded"] > other.metrics["tokens/forwarded"]
    assert (weights(apart) - weights(shared)).abs().max() < 1e-9


WAYS = {
    "adapter, whose reference is the model without it": {"lora": LORA, "algorithm": KL},
    "layers computed again": {"train": {"gradient_checkpointing": True}},
    "adapter, computed again": {"lora": LORA, "algorithm": KL, "train": {"gradient_checkpointing": True}},
    "critic": {"estimator": {"name": "gae"}, "train": {"gradient_checkpointing": True, "updates_per_batch": 2}},
    "reference, entropy, two updates": {
        "algorithm": KL | {"entropy_coefficient": 0.01, "proximal": "recompute"},
        "train": {"updates_per_batch": 2},
    },
    "packed with SDPA": {"train": {"packing": "on", "attention": "sdpa"}},
    "packed with varlen": {"train": {"packing": "on", "attention": "varlen"}, "algorithm": KL},
    "cut groups": {"train": {"micro_batch_tokens": 12}, "algorithm": KL},
    "a completion each": {"train": {"micro_batch_tokens": 1}, "estimator": {"name": "gae"}},
}


@pytest.mark.parametrize("rows", ["one row", "branches"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_training_ends_with_the_weights_of_rows_apart(base, way, rows):
    groups = two_groups() if rows == "one row" else [branches("p"), branches("q", tail=10)]
    apart, shared = (learner(base, share, **WAYS[way]) for share in ("off", "on"))
    before = weights(apart)
    assert (apart.runner.policy.can_share, shared.runner.policy.can_share) == (False, True)
    assert shared.runner.policy.packed == ("packed" in way)
    differences(apart, shared, groups)
    assert (weights(apart) - before).abs().max() > 1e-3
    assert (weights(apart) - weights(shared)).abs().max() < 1e-9


def test_branches_of_a_completion_are_forwarded_once(base):
    groups = [branches("p"), branches("q", tail=10)]
    one, other = differences(learner(base, "off"), learner(base, "on"), groups, steps=1)
    tokens, distinct = prefixes(*groups)
    assert (tokens, distinct) == (92, 38)
    assert (one.metrics["tokens/forwarded"], one.metrics["tokens/shared"]) == (tokens, 0)
    assert (other.metrics["tokens/forwarded"], other.metrics["tokens/shared"]) == (distinct, tokens - distinct)


def test_cut_groups_forward_what_they_share_once_for_each_micro_batch(base):
    trained = learner(base, "on", train={"micro_batch_tokens": 12})
    plan = trained.runner.plan(collate(two_groups()), torch.ones(8, dtype=torch.bool))
    tokens, distinct = prefixes(*two_groups())
    assert len(plan.parts) > 1
    assert all(len(part.tree.tokens_P) <= 12 for part in plan.parts)
    assert sum(len(part.tree.tokens_P) for part in plan.parts) == plan.forwarded
    assert distinct < plan.forwarded < plan.tokens == tokens


def test_a_greedy_completion_is_neither_forwarded_nor_counted(base):
    without = [
        Group(prompt=each.prompt, completions=[one for one in each.completions if not one.greedy])
        for each in two_groups()
    ]
    trained, expected = learner(base, "on"), learner(base, "on")
    report, other = trained.step(collate(two_groups()), 3), expected.step(collate(without), 3)
    tokens, distinct = prefixes(*two_groups())
    for metrics in (report.metrics, other.metrics):
        assert (metrics["tokens/forwarded"], metrics["tokens/shared"]) == (distinct, tokens - distinct)
    assert torch.equal(weights(trained), weights(expected))


def test_equal_rows_bear_their_own_losses_at_one_place(base):
    """The last row is the beginning of another, and two rows are equal with different rewards."""
    rolled = [
        completion(0, [3, 4, 5], Measured(1.0)),
        completion(1, [3, 4, 5], Measured(0.0)),
        completion(2, [3, 4], Measured(0.25)),
    ]
    groups = [Group(prompt=Prompt(id="p", messages=[]), completions=rolled)]
    apart, shared = learner(base, "off"), learner(base, "on")
    _, report = differences(apart, shared, groups)
    assert report.metrics["tokens/forwarded"] == 5
    assert (weights(apart) - weights(shared)).abs().max() < 1e-9


def test_float32_shares_by_itself_with_the_weights_of_rows_apart_up_to_rounding(base):
    apart, shared = (learner(base, share, dtype=torch.float32) for share in ("off", "auto"))
    for _ in range(3):
        report, _ = shared.step(collate(two_groups()), 3), apart.step(collate(two_groups()), 3)
    assert report.metrics["tokens/shared"] > 0
    assert torch.allclose(weights(apart), weights(shared), rtol=0, atol=2e-5)


@pytest.mark.parametrize("way", ["adapter, computed again", "cut groups", "critic"])
def test_the_same_batches_give_equal_bits(base, way):
    one, other = (learner(base, "auto", dtype=torch.float32, **WAYS[way]) for _ in range(2))
    for _ in range(3):
        reports = [each.step(collate([branches("p"), *two_groups()]), 3) for each in (one, other)]
        metrics = [{k: v for k, v in report.metrics.items() if k != "seconds"} for report in reports]
        assert metrics[0] == metrics[1]
    assert metrics[0]["tokens/shared"] > 0
    assert torch.equal(weights(one), weights(other))


@pytest.mark.parametrize("sections", [{}, {"lora": LORA, "algorithm": KL}])
def test_bfloat16_differs_from_rows_apart_by_rounding(base, sections):
    apart, shared = (
        learner(base, share, dtype=torch.float32, model={"dtype": "bfloat16"}, **sections) for share in ("off", "auto")
    )
    one, other = (each.step(collate([branches("p"), *two_groups()]), 3) for each in (apart, shared))
    assert (one.metrics["tokens/shared"], other.metrics["tokens/shared"] > 0) == (0, True)
    for name, near in (("grad_norm", 0.05), ("entropy", 0.01)):
        assert other.metrics[name] == pytest.approx(one.metrics[name], rel=near)
    assert {p.dtype for p in shared.parameters.values()} == {torch.float32}


def unlike(count, shared):
    """Return a group of rows that begin with `shared` equal tokens and have `count` of their own."""
    rolled = [completion(i, [*[9] * (shared - 2), *[10 + i] * count], Measured(float(i % 2))) for i in range(4)]
    return [Group(prompt=Prompt(id="p", messages=[]), completions=rolled)]


@pytest.mark.parametrize("share", ["auto", "on", "off"])
@pytest.mark.parametrize(("count", "pays"), [(20, False), (16, False), (12, True), (2, True)])
def test_auto_shares_where_enough_tokens_are_shared(base, count, pays, share):
    """Three of four rows save the prompt of 2 tokens: 6 of 4 * (2 + count), against a tenth."""
    assert micro_batches.MIN_SHARED["cpu"] == 0.1
    metrics = learner(base, share).step(collate(unlike(count, 2)), 3).metrics
    saved = 6 if share == "on" or (pays and share == "auto") else 0
    assert (metrics["tokens/shared"], metrics["tokens/forwarded"]) == (saved, 4 * (2 + count) - saved)


def test_auto_counts_what_is_left_to_share_once_groups_are_cut(base):
    """Each completion alone fills a micro-batch, so nothing is shared and rows are padded or packed as without it."""
    trained = learner(base, "auto", train={"micro_batch_tokens": 7})
    plan = trained.runner.plan(collate(unlike(2, 4)), torch.ones(4, dtype=torch.bool))
    assert plan.forwarded == plan.tokens == 24
    assert all(part.tree is None for part in plan.parts)
    whole = learner(base, "auto").runner.plan(collate(unlike(2, 4)), torch.ones(4, dtype=torch.bool))
    assert (whole.forwarded, [len(part.tree.tokens_P) for part in whole.parts]) == (12, [12])


@pytest.mark.parametrize("tokens", [12, 10_000])
def test_the_model_is_left_with_attention_over_rows(base, tokens):
    """Other users of the model call it without a tree."""
    trained = learner(base, "on", train={"micro_batch_tokens": tokens}, lora=LORA, algorithm=KL)
    batch = collate(two_groups())
    moved = batch.to(trained.device, trained.dtype)
    trained.runner.forward_statistics(moved, moved.sampled_RT)
    assert trained.model.config._attn_implementation == trained.runner.policy.row_attention
    assert trained.step(batch, 3).metrics["tokens/shared"] > 0
    assert trained.model.config._attn_implementation == trained.runner.policy.row_attention
    assert trained.model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()
