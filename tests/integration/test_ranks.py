"""A step shared by several processes equals the step of one: loss, gradient, metrics, weights (P13, over ranks)."""

from pathlib import Path

import pytest
import torch

from tests.cases.models import write_small_qwen3
from tests.cases.ranks import run_ranks

pytestmark = [pytest.mark.models, pytest.mark.timeout(240), pytest.mark.usefixtures("preloaded")]


def train(folder: Path, *sizes: int) -> dict[int, list[dict]]:
    """Return the final state of every rank, by number of ranks. With three ranks, one has no work."""
    write_small_qwen3(folder / "base", 40, layers=1, tied=False)
    run_ranks("one_rank.py", str(folder), *map(str, sizes))
    return {size: [torch.load(folder / f"{rank}-of-{size}.pt") for rank in range(size)] for size in sizes}


def as_one(alone: dict, several: list[dict]) -> None:
    """Check that every rank ended as one process did, with bitwise equal weights on all ranks."""
    first, *_ = several
    for rank, shared in enumerate(several):
        for case, expected in alone.items():
            result = shared[case]
            assert result["skipped"] == expected["skipped"] == ["", "", "no_valid_row"]
            for name, value in expected["weights"].items():
                assert torch.allclose(result["weights"][name], value, rtol=0, atol=1e-5), (rank, case, name)
                assert torch.equal(result["weights"][name], first[case]["weights"][name]), (rank, case, name)
            for one, other in zip(expected["metrics"], result["metrics"], strict=True):
                assert one.keys() == other.keys()
                for name, value in one.items():
                    assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (rank, case, name)


def same_weights_without_sharing(results: list[dict]) -> None:
    """Check that ranks whose rows ran as prefix trees end with the weights of those whose rows ran apart."""
    for result in results:
        apart, shared = result["rows apart"], result["rows as trees"]
        saved = [[metrics["tokens/shared"] for metrics in case["metrics"]] for case in (apart, shared)]
        assert saved == [[0, 0, 0], [2, 2, 0]]
        for name, value in apart["weights"].items():
            assert torch.allclose(shared["weights"][name], value, rtol=0, atol=1e-5), name


def test_two_ranks_match_one_process_and_all_refuse_if_only_some_lay_out_rows_so(tmp_path):
    results = train(tmp_path, 1, 2)
    as_one(results[1][0], results[2])
    same_weights_without_sharing([*results[1], *results[2]])
    for rank in results[2]:
        refusals = rank["refusals"]
        for refusal in refusals.values():
            assert "set train.packing and train.share_history to 'off'" in refusal
        assert "packed, apart; padded, apart" in refusals["packed"]
        assert "padded, apart; padded, shared" in refusals["can_share"]


@pytest.mark.full
def test_three_ranks_match_one_process_if_one_has_no_work(tmp_path):
    results = train(tmp_path, 1, 3)
    as_one(results[1][0], results[3])
    same_weights_without_sharing(results[3])
    assert sorted(result["clipped"]["parts"] for result in results[3]) == [0, 1, 1]
