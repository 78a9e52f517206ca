"""The published presets contain what their names state, and only registered rules and levels."""

import subprocess
import sys

import pytest

from workers.settings.algorithm import PRESETS
from workers.train.algorithms.correction import IMPORTANCE_LEVELS, REJECTIONS

each_preset = pytest.mark.parametrize("name", PRESETS)


def test_all_published_presets_are_registered():
    decoupled = "token_is seq_is token_icepop seq_is_rs geo_rs geo_rs_seq_tis geo_rs_token_tis k3_rs k3_rs_seq_tis"
    bypass = "ppo_clip ppo_clip_geo_rs ppo_clip_k3_rs pg_is pg_token_icepop pg_geo_rs pg_geo_rs_seq_tis"
    names = {f"decoupled_{name}" for name in [*decoupled.split(), "k3_rs_token_tis"]}
    names |= {f"bypass_{name}" for name in [*bypass.split(), "pg_geo_rs_token_tis"]}
    assert set(PRESETS) == names | {"disabled"}
    assert len(PRESETS) == 19


@each_preset
def test_a_presets_name_describes_it_completely(name):
    words, preset = name.split("_"), PRESETS[name]
    assert preset.bypass == ("bypass" in words)
    assert preset.loss == ("reinforce" if "pg" in words else "clipped")
    level = "token" if "token" in words else "sequence" if {"is", "tis"} & set(words) else "none"
    assert preset.weights == level
    icepop = "icepop" in words
    assert (*preset.weight_range, preset.out_of_range) == ((0.5, 5.0, "zero") if icepop else (0.0, 2.0, "truncate"))
    expected = {
        "geo": {"seq_mean_k1": (0.999, 1.001)},
        "k3": {"seq_mean_k3": (0.0, 0.01)},
        "is": {"seq_sum_k1": (0.5, 2.0)},
    }
    kind = next((word for word in ("geo", "k3", "is") if word in words), "")
    assert preset.reject == (expected[kind] if "rs" in words else {})


@each_preset
def test_a_presets_rules_and_levels_are_registered(name):
    preset = PRESETS[name]
    assert preset.weights in {"none", *IMPORTANCE_LEVELS}
    assert set(preset.reject) <= set(REJECTIONS)


def test_presets_load_without_torch():
    code = "import sys; import workers.settings.algorithm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
