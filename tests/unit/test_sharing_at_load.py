"""The test of a model at load: whether its rows may run as the prefix tree that they share."""

import pytest
import torch
import transformers
from structlog.testing import capture_logs

from stream.errors import SettingsError
from tests.unit.test_logprobs import FAMILIES, SHAPE, VOCABULARY, model_of
from workers.settings import TrainSettings
from workers.train.model import attention, attention_kernels
from workers.train.model.attention import set_attention
from workers.train.model.attention_kernels import TREE, switch_attention
from workers.train.model.lm_head import find_lm_head
from workers.train.model.logprobs import LogprobModel

pytestmark = pytest.mark.models

LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
REFUSED = {
    "Mamba": ({"hidden_size": 32, "num_hidden_layers": 2}, "needs masks"),
    "Mamba2": (
        {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "n_groups": 1, "num_hidden_layers": 2},
        "needs masks",
    ),
    "Bloom": ({"hidden_size": 16, "n_layer": 1, "n_head": 2}, "needs masks"),
    "Lfm2": ({**SHAPE, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}, "are off by"),
    "Qwen3Next": (
        {
            **SHAPE,
            **LAYERS,
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
        "are off by",
    ),
    "Gemma2": ({**SHAPE, "head_dim": 8}, "has no softcap"),
}
"""Models that cannot branch, and why."""


def set_sharing(model, share, *, dtype=None, packing="off"):
    return set_attention(
        LogprobModel(model, find_lm_head(model)),
        TrainSettings(share_history=share, packing=packing),
        dtype or next(model.parameters()).dtype,
    )


def made(name):
    config = getattr(transformers, f"{name}Config")(**{"vocab_size": VOCABULARY} | REFUSED[name][0])
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:  # larger than a new model's, so that tokens affect each other
                torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_branch_keeps_rows_apart_and_says_why(name):
    model = made(name)
    own = model.config._attn_implementation
    with capture_logs() as logs:
        read = set_sharing(model, "auto")
    assert not read.can_share
    assert [(line["log_level"], line["model"]) for line in logs if line["event"] == "history.not_shared"] == [
        ("warning", type(model).__name__)
    ]
    assert REFUSED[name][1] in logs[-1]["reason"]
    assert model.config._attn_implementation == own


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_branch_is_refused_if_sharing_is_on(name):
    model = made(name)
    own = model.config._attn_implementation
    with pytest.raises(SettingsError, match=r"train\.share_history is 'on', but .*") as refused:
        set_sharing(model, "on")
    assert f"{type(model).__name__} gives other results for rows that share their prefixes" in str(refused.value)
    assert REFUSED[name][1] in str(refused.value)
    assert str(refused.value).endswith("set train.share_history to 'auto' or 'off'")
    assert model.config._attn_implementation == own
    assert not set_sharing(model, "off").can_share


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_that_packing_supports_share_too(name, dtype):
    model = model_of(name, torch.float32)
    own = model.config._attn_implementation
    with capture_logs() as logs:
        assert set_sharing(model, "auto", dtype=dtype).can_share
    assert [line for line in logs if line["log_level"] == "warning"] == []
    assert model.config._attn_implementation == own


def test_off_tests_nothing(monkeypatch):
    monkeypatch.setattr(attention, "sharing_problem", lambda *_: pytest.fail("it was tested"))
    assert not set_sharing(model_of("qwen3"), "off").can_share


@pytest.mark.parametrize(
    ("dtype", "leak", "reason"),
    [
        (torch.float64, 1e-2, "rows that share their prefixes are off by"),
        (torch.float64, 1e-9, "a row sees what follows a shared prefix in another row"),
        (torch.float32, 3e-6, "a row sees what follows a shared prefix in another row"),
        (torch.float32, 1e-2, "rows that share their prefixes are off by"),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_attention_to_siblings_is_detected(monkeypatch, dtype, leak, reason, backwards):
    """A small leak is within the tolerance for rows apart, and found by changing another row."""
    inner = attention_kernels.tree_attention

    def leaking(*inputs, **others):
        out, weights = inner(*inputs, **others)
        seen = out.flip(1).cumsum(1).flip(1) if backwards else out.cumsum(1)
        return out + leak * seen, weights

    monkeypatch.setattr(attention_kernels, "tree_attention", leaking)
    with pytest.raises(SettingsError, match=reason):
        set_sharing(model_of("qwen3", dtype), "on")


def test_a_mask_of_prefix_or_own_leaf_is_not_a_tree(monkeypatch):
    """Rows that branch a second time below a branch would lose what lies between the two."""
    inner = attention_kernels.attend_by_branch

    def two_levels(query, key, value, tree, *options):
        kept = [
            branch._replace(path=(branch.path[0], branch.path[-1]))
            if len(branch.path) > 2 and branch.length == tree.segment_lengths[branch.path[-1]]
            else branch
            for branch in tree.branches
        ]
        assert kept != list(tree.branches)
        return inner(query, key, value, tree._replace(branches=tuple(kept)), *options)

    monkeypatch.setattr(attention_kernels, "attend_by_branch", two_levels)
    with pytest.raises(SettingsError, match="are off by"):
        set_sharing(model_of("qwen3"), "on")


def test_values_that_are_not_numbers_are_no_proof(monkeypatch):
    inner = attention_kernels.tree_attention
    monkeypatch.setattr(attention_kernels, "tree_attention", lambda *i, **o: (inner(*i, **o)[0] * torch.nan, None))
    with pytest.raises(SettingsError, match="are off by nan"):
        set_sharing(model_of("qwen3"), "on")


def test_a_model_that_does_not_pass_the_tree_on_is_refused(monkeypatch):
    model = model_of("qwen3")
    inner = model.model.forward

    def without_tree(*inputs, prefix_tree=None, **others):
        return inner(*inputs, **others)

    monkeypatch.setattr(model.model, "forward", without_tree)
    with pytest.raises(SettingsError, match=r"it fails: .*prefix_tree"):
        set_sharing(model, "on")
    assert switch_attention(model, TREE) == ""
