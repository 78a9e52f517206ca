"""A step shared by several processes is the step of one: loss, gradient, metrics, weights (P13, over ranks)."""

from pathlib import Path

import pytest
import torch

from tests.cases.models import write_small_qwen3
from tests.cases.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)


def train(folder: Path, *sizes: int) -> dict[int, list[dict]]:
    """What every rank of runs with so many of them ended with. With three, one has nothing to do."""
    write_small_qwen3(folder / "base", 40, layers=1, tied=False)
    run_ranks("one_rank.py", str(folder), *map(str, sizes))
    return {size: [torch.load(folder / f"{rank}-of-{size}.pt") for rank in range(size)] for size in sizes}


def as_one(alone: dict, several: list[dict]) -> None:
    """Every rank ended as one process did; and all of them with the same weights, to the bit."""
    first, *_ = several
    for rank, shared in enumerate(several):
        for case, expected in alone.items():
            found = shared[case]
            assert found["skipped"] == expected["skipped"] == ["", "", "no_valid_row"]
            for name, value in expected["weights"].items():
                assert torch.allclose(found["weights"][name], value, rtol=0, atol=1e-5), (rank, case, name)
                assert torch.equal(found["weights"][name], first[case]["weights"][name]), (rank, case, name)
            for one, other in zip(expected["metrics"], found["metrics"], strict=True):
                assert one.keys() == other.keys()
                for name, value in one.items():
                    assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (rank, case, name)


def test_two_ranks_end_with_what_one_process_ends_with(tmp_path):
    results = train(tmp_path, 1, 2)
    as_one(results[1][0], results[2])


@pytest.mark.full
def test_three_ranks_of_which_one_has_nothing_to_do_end_with_it_too(tmp_path):
    results = train(tmp_path, 1, 3)
    as_one(results[1][0], results[3])
    assert sorted(found["clipped"]["parts"] for found in results[3]) == [0, 1, 1]
