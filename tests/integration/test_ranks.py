"""A step shared by several processes is the step of one: loss, gradient, metrics, weights (P13, over ranks)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

WORKER = Path(__file__).parents[1] / "one_rank.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every rank of runs with 1, 2 and 3 of them ended with. With three, one has nothing to do."""
    folder = tmp_path_factory.mktemp("ranks")
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
    )
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(5)
        Qwen3ForCausalLM(config).save_pretrained(folder / "base")
    found = {}
    for size in (1, 2, 3):
        ranks = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(folder), str(rank), str(size)],
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            )
            for rank in range(size)
        ]
        try:
            assert [process.wait(timeout=100) for process in ranks] == [0] * size
        finally:
            for process in ranks:
                process.kill()
        found[size] = [torch.load(folder / f"{rank}-of-{size}.pt") for rank in range(size)]
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_end_with_what_one_process_ends_with(results, size):
    (alone,) = results[1]
    for rank, shared in enumerate(results[size]):
        for case, expected in alone.items():
            found = shared[case]
            assert found["skipped"] == expected["skipped"] == ["", "", "no_valid_row"]
            for name, value in expected["weights"].items():
                assert torch.allclose(found["weights"][name], value, rtol=0, atol=1e-5), (rank, case, name)
            for one, other in zip(expected["metrics"], found["metrics"], strict=True):
                assert one.keys() == other.keys()
                for name, value in one.items():
                    assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (rank, case, name)


def test_all_ranks_end_with_the_same_weights_to_the_bit(results):
    for size in (2, 3):
        first, *others = results[size]
        for other in others:
            for case, found in first.items():
                for name, value in found["weights"].items():
                    assert torch.equal(other[case]["weights"][name], value), (size, case, name)


def test_one_of_three_ranks_has_nothing_to_do(results):
    assert sorted(found["clipped"]["parts"] for found in results[3]) == [0, 1, 1]
