"""A pass over a prefix tree reads nothing from the device: the host would wait for all work that it queued."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases.models import write_small_qwen3
from tests.unit.test_logprobs import VOCABULARY, model_of
from tests.unit.test_share_history import learner, two_groups
from workers.train.model import attention_kernels
from workers.train.model.attention_kernels import TREE, attend_in_blocks, switch_attention
from workers.train.model.lm_head import LMHead
from workers.train.model.logit_blocks import LogitTransform
from workers.train.model.logprobs import _hidden, lay_out, lay_out_tree
from workers.train.model.prefix_tree import PrefixTree
from workers.train.step.batch import collate

pytestmark = pytest.mark.models

ROWS = [np.array(row) for row in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6])]
READING = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "equal", "unique", "_unique2"} | {
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
}


class Reads(TorchFunctionMode):
    """Counts calls for which the host would wait if tensors were on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        self.count[name] += name in READING
        if name in {"__getitem__", "__setitem__"}:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.count["mask"] += any(isinstance(place, Tensor) and place.dtype == torch.bool for place in places)
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


@pytest.fixture
def simulated(monkeypatch):
    """A model on a simulated device, whose values the host cannot read; its attention computes nothing."""
    passes = []

    def attend(query, key, value, tree, *options):
        passes.append(tree)
        return torch.empty_like(query)

    monkeypatch.setattr(attention_kernels, "attend_by_branch", attend)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model_of("qwen3", torch.float32)
        yield model, LMHead(model.get_output_embeddings(), LogitTransform()), passes


def test_a_pass_over_a_tree_reads_nothing_from_a_simulated_device(simulated):
    model, head, passes = simulated
    assert switch_attention(model, TREE) == ""
    tree = PrefixTree.from_rows(ROWS)
    tree = tree._replace(**{name: getattr(tree, name).clone() for name in tree._fields if name.endswith(("P", "T"))})
    assert all(isinstance(tensor, FakeTensor) for tensor in (tree.tokens_P, tree.ends_P, tree.places_MT))
    hidden = _hidden(model, head, lay_out_tree(tree).inputs, tree.places_MT.flatten())
    assert hidden.shape == (12, 16)
    assert len(passes) == 2
    assert all(seen.tokens_P is tree.tokens_P for seen in passes)


def test_the_simulated_device_notices_a_read(simulated):
    lengths = torch.tensor([4, 3]).clone()
    with pytest.raises(DataDependentOutputException):
        lay_out(torch.zeros(2, 4, dtype=torch.int64), lengths, packed=True)


@pytest.mark.parametrize("window", [None, 2])
def test_the_mask_of_blocks_is_made_without_a_read(monkeypatch, window):
    monkeypatch.setattr(attention_kernels, "flex_attention", lambda query, *_, **__: query)
    query = torch.zeros(1, 2, 128, 8)
    tree = PrefixTree.from_rows([np.arange(128)])
    with Operators() as seen:
        attend_in_blocks(query, query, query, tree, None, window)
        made = set(seen.names)
        int(tree.ends_P.max())
    reading = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}
    assert len(made) > 5
    assert not made & reading
    assert seen.names & reading


def test_micro_batches_of_trees_read_no_more_than_rows_apart(tmp_path):
    """The plan reads the rows once for a batch; each micro-batch more costs as many reads as one of rows apart."""
    base = write_small_qwen3(tmp_path, VOCABULARY, layers=2, tied=False)
    batch, reads, parts = collate(two_groups()), {}, {}
    for share in ("off", "on"):
        for tokens in (1, 10_000):
            trained = learner(base, share, train={"micro_batch_tokens": tokens})
            with Reads() as counted:
                trained.step(batch, 3)
            reads[share, tokens] = counted.count.total()
            parts[share, tokens] = len(trained.runner.plan(batch, torch.ones(8, dtype=torch.bool)).parts)
    assert parts == {("off", 1): 8, ("on", 1): 8, ("off", 10_000): 1, ("on", 10_000): 1}
    more = {share: reads[share, 1] - reads[share, 10_000] for share in ("off", "on")}
    assert 0 < more["on"] <= more["off"]
    assert reads["on", 10_000] - reads["off", 10_000] <= 4
