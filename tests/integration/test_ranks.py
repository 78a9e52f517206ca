"""A step shared by several processes equals the step of one: loss, gradient, metrics, weights (P13, over ranks)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cases.models import write_small_qwen3
from tests.cases.ranks import TESTS, run_ranks

pytestmark = pytest.mark.timeout(240)


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


def test_two_ranks_match_one_process(tmp_path):
    results = train(tmp_path, 1, 2)
    as_one(results[1][0], results[2])


@pytest.mark.full
def test_three_ranks_match_one_process_if_one_has_no_work(tmp_path):
    results = train(tmp_path, 1, 3)
    as_one(results[1][0], results[3])
    assert sorted(result["clipped"]["parts"] for result in results[3]) == [0, 1, 1]


UNLIKE = """
import sys
import torch, torch.distributed as dist
from stream.errors import SettingsError
from workers.settings.toml_file import parse_settings
from workers.train.model.logprobs import LogprobModel
from workers.train.distributed.ranks import Ranks
from workers.train.step import model_runner

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=rank, world_size=2)
settings = parse_settings({"model": {"path": "m"}, "data": {"path": "d"}, "environments": {"a": "calculator"}})
model_runner.set_attention = lambda read, *_: read._replace(packed=rank == 0)  # as unlike devices would have it
try:
    model_runner.ModelRunner(LogprobModel(torch.nn.Linear(1, 1), None), None, None, settings, Ranks())
except SettingsError as error:
    print(error)
"""


def test_all_ranks_refuse_if_only_some_pack_rows(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", UNLIKE, str(tmp_path), str(rank)],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            cwd=TESTS.parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for output in outputs:
        assert "set train.packing to 'off'" in output
