"""Rows as the prefix tree that they share: what holds for random trees, against the same rows apart."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.cases.norms import exact_norms
from workers.settings import TrainSettings
from workers.train.model.attention import set_attention
from workers.train.model.attention_kernels import attend_by_branch, attend_in_blocks
from workers.train.model.logprobs import LogprobModel, token_logprobs
from workers.train.model.prefix_tree import PrefixTree, count_places
from workers.train.model.trainable_model import checkpoint_layers
from workers.train.step.micro_batches import split_trees

VOCABULARY = 13
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
}


@st.composite
def trees(draw):
    """Rows that leave earlier ones anywhere: to depth 6 and more, duplicates and beginnings of others among them."""
    rows = []
    for _ in range(draw(st.integers(1, 7))):
        kept = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else []
        kept = kept[: draw(st.integers(0, len(kept)))]
        new = draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=6))
        rows.append([*kept, *new])
    return [np.array(row) for row in rows]


@given(trees())
def test_a_tree_has_one_place_for_each_prefix_which_sees_the_shorter_ones(rows):
    tree = PrefixTree.from_rows(rows)
    prefixes = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert len(tree.tokens_P) == count_places(rows) == len(prefixes)
    places = torch.arange(len(prefixes))
    visible = (places <= places.unsqueeze(1)) & (places.unsqueeze(1) < tree.ends_P)
    for row, own in zip(rows, tree.places_MT, strict=True):
        path = own[: len(row)].tolist()
        assert tree.tokens_P[path].tolist() == row.tolist()
        assert tree.depths_P[path].tolist() == list(range(len(row)))
        assert all(visible[place].nonzero().squeeze(1).tolist() == path[: i + 1] for i, place in enumerate(path))


@given(trees())
def test_branches_partition_the_places_and_their_paths_are_what_the_last_token_sees(rows):
    tree = PrefixTree.from_rows(rows)
    starts = [0, *accumulate(tree.segment_lengths)]
    ends = list(accumulate(branch.length for branch in tree.branches))
    assert ends[-1] == starts[-1] == len(tree.tokens_P)
    for branch, end in zip(tree.branches, ends, strict=True):
        path = [place for segment in branch.path for place in range(starts[segment], starts[segment + 1])]
        assert path == [k for k in range(end) if end - 1 < tree.ends_P[k]]


@given(trees(), st.data())
def test_micro_batches_keep_completions_together_and_their_bound(rows, data):
    completions = {number: data.draw(st.integers(0, 3)) for number in range(len(rows))}
    bound = data.draw(st.integers(1, 30))
    parts = split_trees(dict(enumerate(rows)), completions, bound)
    assert sorted(number for part in parts for number in part) == list(range(len(rows)))
    for part in parts:
        assert count_places([rows[number] for number in part]) <= bound or len({completions[n] for n in part}) == 1
    owners = [{completions[number] for number in part} for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@given(trees(), st.sampled_from([None, 1, 3]), st.integers(0, 2**16))
def test_blocks_of_a_gpu_attend_as_branches_do(rows, window, seed):
    generator = torch.Generator().manual_seed(seed)
    tree = PrefixTree.from_rows(rows)
    query, key, value = (
        torch.randn(1, heads, len(tree.tokens_P), 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    branches = attend_by_branch(query, key, value, tree, 0.3, window)
    assert torch.allclose(branches, attend_in_blocks(query, key, value, tree, 0.3, window), rtol=0, atol=1e-12)


def _model(name):
    torch.default_generator.manual_seed(3)
    if name == "sliding window":
        model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=3))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=name == "tied"))
    model = model.double().eval()
    if name == "recomputed":
        checkpoint_layers(model)
    return set_attention(LogprobModel.from_whole(model), TrainSettings(share_history="on"), torch.float64)


@pytest.fixture(scope="module", params=["tied", "recomputed", "sliding window"])
def model(request):
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        exact_norms(patch.setattr)
        yield _model(request.param)


@given(trees(), st.data())
def test_passes_and_gradients_are_those_of_rows_apart(model, rows, data):
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
    columns = torch.arange(tokens.shape[1])
    real = (columns > 0) & (columns < lengths.unsqueeze(1))
    chosen = real & (
        torch.tensor(data.draw(st.lists(st.booleans(), min_size=real.numel(), max_size=real.numel()))).view_as(real)
    )
    factors = torch.randn(int(chosen.sum()), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results, gradients = [], []
    for tree in (None, PrefixTree.from_rows(rows)):
        model.model.zero_grad(set_to_none=True)
        result = token_logprobs(
            model._replace(tree=tree),
            tokens,
            chosen,
            temperature=0.7,
            lengths_M=lengths,
            entropy="gradient",
            sum_pi_squared=True,
            end_states=True,
        )
        (result.logprobs_N @ factors + 0.1 * result.entropy_N.sum()).backward()
        results.append(result)
        gradients.append(
            torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.model.parameters()])
        )
    for name, expected in results[0]._asdict().items():
        assert torch.allclose(getattr(results[1], name), expected, rtol=0, atol=1e-10), name
    assert torch.allclose(*gradients, rtol=0, atol=1e-9)
