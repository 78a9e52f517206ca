"""The benchmark of advantages can tell a view from a copy."""

import torch

from benchmarks.advantages import is_view


def test_a_copy_is_not_mistaken_for_a_view():
    values = torch.arange(3.0)
    view = values.unsqueeze(1).expand(3, 5)
    assert is_view(view)
    assert not is_view(view.contiguous())
    assert not is_view(values.repeat(5).view(5, 3).t())
    assert not is_view(torch.zeros(15)[:3].unsqueeze(1).expand(3, 5))
