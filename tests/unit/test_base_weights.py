"""Adapters that the local engine adds to its weights: the sum is the trainer's, whatever was there before."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stream.errors import EngineRefusedError
from tests.cases.models import loaded_once, write_small_qwen3
from tests.unit.test_learner import VOCABULARY
from tests.unit.test_lora import lora, trained
from workers.local_engine.base_weights import ADAPTER_FILE, BaseWeights
from workers.local_engine.weights import load_model, load_weights

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with loaded_once():
        yield write_small_qwen3(tmp_path_factory.mktemp("bases") / "base", VOCABULARY, layers=2, tied=True)


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Two adapters of one policy, of which the second changes other layers, and their merged weights."""
    home, found = tmp_path_factory.mktemp("adapters"), []
    for number, targets in enumerate((["q_proj", "down_proj"], ["q_proj", "up_proj"])):
        learner = trained(base, steps=number + 1, more={"target_modules": targets})
        (home / str(number)).mkdir()
        learner.write_trained_weights(home / str(number))
        found.append((home / str(number), learner.policy.adapter.merged_state()))
    return found


def engine(base, dtype=torch.float32):
    return load_model(base, "causal model", dtype)


def holds(model, weights):
    live = model.state_dict()
    return live.keys() == weights.keys() and all(torch.equal(live[name], value) for name, value in weights.items())


def changed(folder, to, **metadata):
    """Copy an adapter whose tensors or metadata the caller changes."""
    shutil.copytree(folder, to)
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        tensors, entries = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors |= metadata.pop("tensors", {})
    given = {name: value for name, value in (entries | metadata).items() if value is not None}
    save_file(tensors, to / ADAPTER_FILE, given)
    return to


def test_each_adapter_is_added_to_the_base_and_not_to_the_one_before(base, adapters):
    model = engine(base)
    weights = BaseWeights(model)
    for folder, merged in (adapters[0], adapters[1], adapters[0], adapters[0]):
        weights.add(folder)
        assert holds(model, merged)


def test_in_bfloat16_the_sum_is_rounded_once(base, tmp_path):
    learner = trained(base, dtype="bfloat16")
    learner.write_trained_weights(tmp_path)
    model = engine(base, torch.bfloat16)
    BaseWeights(model).add(tmp_path)
    assert holds(model, learner.policy.adapter.merged_state())


def test_an_untrained_adapter_changes_nothing(base, tmp_path):
    lora(base).write_trained_weights(tmp_path)
    model = engine(base)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    BaseWeights(model).add(tmp_path)
    assert holds(model, before)


def test_whole_weights_become_the_base(base, adapters, tmp_path):
    model = engine(base)
    weights = BaseWeights(model)
    weights.add(adapters[0][0])
    others = {name: value * 2 for name, value in load_file(base / "model.safetensors").items()}
    save_file(others, tmp_path / "others.safetensors")
    load_weights(model, tmp_path / "others.safetensors")
    weights.forget()
    with pytest.raises(EngineRefusedError, match="trained on other weights than this engine began with"):
        weights.add(adapters[0][0])
    load_weights(model, base)
    weights.add(adapters[1][0])
    assert holds(model, adapters[1][1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": "0" * 32}, "trained on other weights"),
        ({"base": None}, "trained on other weights"),
        ({"scale": None}, "no finite scale"),
        ({"scale": "inf"}, "no finite scale"),
        ({"scale": "two"}, "no finite scale"),
        ({"tensors": {"A": torch.zeros(5, 16)}}, "q_proj.weight: matrices .* have no product"),
        ({"tensors": {"A": torch.zeros(16)}}, "q_proj.weight: matrices .* have no product"),
        ({"tensors": {"A": torch.full((4, 16), float("nan"))}}, "q_proj.weight is not finite"),
        ({"tensors": {"A": torch.full((4, 16), 1e30), "B": torch.full((16, 4), 1e30)}}, "q_proj.weight is not finite"),
        ({"tensors": {"A": torch.zeros(4, 15)}}, r"q_proj.weight \(16, 15\) instead of \(16, 16\)"),
        (
            {"tensors": {"base_model.model.more.lora_A.weight": torch.zeros(4, 4)}},
            r"more\.lora_A\.weight has no partner",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_leaves_the_weights_as_they_are(base, adapters, tmp_path, change, message):
    place = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    if "tensors" in change:
        tensors = {f"{place}{name}.weight" if len(name) == 1 else name: t for name, t in change["tensors"].items()}
        change = {"tensors": tensors}
    folder = changed(adapters[0][0], tmp_path / "changed", **change)
    model = engine(base)
    weights = BaseWeights(model)
    weights.add(adapters[1][0])
    with pytest.raises(EngineRefusedError, match=message) as refused:
        weights.add(folder)
    assert "the old weights stay" in str(refused.value)
    assert holds(model, adapters[1][1])


def test_a_truncated_adapter_is_refused(base, adapters, tmp_path):
    shutil.copytree(adapters[0][0], tmp_path / "cut")
    file = tmp_path / "cut" / ADAPTER_FILE
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(EngineRefusedError, match="cannot be read as safetensors"):
        BaseWeights(engine(base)).add(tmp_path / "cut")


def test_the_scale_is_that_of_the_settings(adapters):
    config = json.loads((adapters[0][0] / "adapter_config.json").read_text())
    with safe_open(adapters[0][0] / ADAPTER_FILE, framework="pt") as file:
        assert float(file.metadata()["scale"]) == config["lora_alpha"] / config["r"] == 2.0
