"""Names of groups as codes; the benchmark can tell a view from a copy."""

import torch

from benchmarks.advantages import is_view
from workers.train.algorithms.grouping import Grouping, encode_ids


def test_codes_are_in_order_of_first_appearance():
    codes, names = encode_ids(["b", "a", "b", "", "a", "B"])
    assert codes.tolist() == [0, 1, 0, 2, 1, 3]
    assert codes.dtype == torch.int64
    assert names == ["b", "a", "", "B"]


def test_no_ids_give_no_groups():
    codes, names = encode_ids([])
    assert (codes.shape, codes.dtype, names) == ((0,), torch.int64, [])
    assert Grouping(codes, torch.empty(0, dtype=torch.bool), 0).count_G.tolist() == []


def test_codes_group_like_names():
    rewards = torch.tensor([1.0, 10.0, 3.0, 30.0], dtype=torch.float64)
    codes, names = encode_ids(["y", "x", "y", "x"])
    groups = Grouping(codes, torch.ones(4, dtype=torch.bool), len(names))
    assert dict(zip(names, groups.mean(rewards).tolist(), strict=True)) == {"y": 2.0, "x": 20.0}


def test_a_copy_is_not_mistaken_for_a_view():
    values = torch.arange(3.0)
    view = values.unsqueeze(1).expand(3, 5)
    assert is_view(view)
    assert not is_view(view.contiguous())
    assert not is_view(values.repeat(5).view(5, 3).t())
    assert not is_view(torch.zeros(15)[:3].unsqueeze(1).expand(3, 5))
