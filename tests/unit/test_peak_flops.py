"""The peak FLOP/s that a training step is compared with: the card's, or none."""

import pytest

from benchmarks.train_step import PEAKS, peak_flops


@pytest.mark.parametrize(
    ("card", "of"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_known_gpus_have_their_peak(card, of):
    assert peak_flops(card) == PEAKS[of]


@pytest.mark.parametrize("card", ["NVIDIA L40", "NVIDIA A10G", "NVIDIA GB200", "NVIDIA GeForce RTX 4090 Laptop GPU"])
def test_a_gpu_with_a_similar_name_has_no_peak(card):
    assert peak_flops(card) is None
