"""LoRA: only an adapter is trained, the initial policy is the model without it, and merging is exact."""

import shutil
import sys
import warnings

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stream.errors import RunMismatchError, SettingsError
from tests.cases.models import loaded_once, write_small_qwen3
from tests.unit.test_learner import VOCABULARY, completion, group, learner
from workers.evaluate.evaluate import find_policy_folder
from workers.runs.progress import Progress
from workers.settings.toml_file import parse_settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.checkpointing.export import export
from workers.train.model.adapter import merge_adapter
from workers.train.model.lm_head import find_lm_head
from workers.train.model.logprobs import LogprobModel, token_logprobs
from workers.train.step.batch import collate
from workers.train.step.model_runner import ModelRunner

pytestmark = pytest.mark.models

TOLERANCE = 1e-5
LEAST = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"ref": "r.py:f"}]}
LORA = {"rank": 4, "alpha": 8.0}
TIED = pytest.mark.parametrize("base", [True, False], indirect=True, ids=["tied", "untied"])


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A model whose output layer is its embedding, and one whose output layer is separate."""
    home = tmp_path_factory.mktemp("bases")
    with loaded_once():
        yield {tied: write_small_qwen3(home / str(tied), VOCABULARY, layers=2, tied=tied) for tied in (True, False)}


@pytest.fixture
def base(bases, request):
    return bases[getattr(request, "param", True)]


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (3, 9), generator=generator)
    chosen = torch.rand(3, 9, generator=generator) < 0.5
    chosen[:, 0] = False
    return tokens, chosen


def lora(base, *, dtype="float32", more=None, **sections):
    return learner(base, dtype=dtype, lora=LORA | (more or {}), **sections)


def trained(base, steps=3, **options):
    """Return a learner after some steps, with both matrices of every layer changed."""
    result = lora(base, **options)
    for step in range(steps):
        assert result.step(collate([group(completion(2, 0.25, [9, 3 + step]))]), 3).trained
    assert all(p.abs().max() > 0 for p in result.parameters.values())
    return result


def read(model, rows):
    with torch.no_grad():
        return token_logprobs(LogprobModel(model, find_lm_head(model)), *rows, temperature=1.0).logprobs_N


def whole_logprobs(model, rows):
    """Return log-probs of a plain forward pass."""
    tokens, chosen = rows
    with torch.no_grad():
        result = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return result.gather(2, tokens[:, 1:, None]).squeeze(2)[chosen[:, 1:]]


def plain(folder, rows):
    """Return log-probs that transformers computes from a model's folder, without adapters."""
    return whole_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), rows)


def other_weights(adapted):
    """Return all parameters that are not of the adapter."""
    return {n: p.detach().clone() for n, p in adapted.model.named_parameters() if "lora_" not in n}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_untrained_adapter_has_no_effect(base, rows, dtype):
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        whole = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)).eval()
        assert torch.equal(read(lora(base, dtype=dtype).model, rows), read(whole, rows))


@TIED
def test_only_the_adapter_is_trained(base):
    result = lora(base)
    before, adapter = other_weights(result), {n: p.detach().clone() for n, p in result.parameters.items()}
    for _ in range(2):
        result.step(collate([group()]), 3)
    assert all(torch.equal(value, before[name]) for name, value in other_weights(result).items())
    assert not any(torch.equal(value, adapter[name]) for name, value in result.parameters.items())
    assert result.optimizer.adamw.state.keys() == set(result.parameters.values())
    assert {n for n, p in result.model.named_parameters() if p.requires_grad} == {
        name.removeprefix("base_model.model.").replace(".weight", ".default.weight") for name in result.parameters
    }


def test_bfloat16_halves_the_frozen_weights_and_the_adapter_stays_float32(base):
    result = trained(base, dtype="bfloat16")
    assert {p.dtype for n, p in result.model.named_parameters() if "lora_" not in n} == {torch.bfloat16}
    assert {p.dtype for p in result.parameters.values()} == {torch.float32}
    assert {v.dtype for state in result.optimizer.adamw.state.values() for v in state.values()} == {torch.float32}


@TIED
def test_merged_weights_equal_the_adapted_model(base, rows, tmp_path):
    result = trained(base, weights={"transport": "files"})
    result.copy_weights()(tmp_path / "v1")
    adapted = read(result.model, rows)
    assert torch.allclose(plain(tmp_path / "v1", rows), adapted, atol=TOLERANCE)
    assert not torch.allclose(plain(base, rows), adapted, atol=100 * TOLERANCE)
    ours, theirs = (load_file(folder / "model.safetensors").keys() for folder in (tmp_path / "v1", base))
    assert ours == theirs


def test_merging_changes_nothing_in_the_model(base, rows):
    result = trained(base)
    before, logprobs = other_weights(result), read(result.model, rows)
    result.policy.adapter.merged_state()
    assert all(torch.equal(value, before[name]) for name, value in other_weights(result).items())
    assert torch.equal(read(result.model, rows), logprobs)


@TIED
def test_peft_loads_the_written_adapter_with_the_same_log_probs(base, rows, tmp_path):
    result = trained(base)
    result.write_trained_weights(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():  # peft looks up a name that transformers deprecates since 5.6
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*is_gradient_checkpointing")
        adapted = peft.PeftModel.from_pretrained(model, tmp_path)
    assert torch.allclose(whole_logprobs(adapted, rows), read(result.model, rows), atol=TOLERANCE)


def test_the_reference_policy_is_the_model_without_its_adapter(base, rows):
    """Loss, gradient and metrics equal those with the reference as a second model."""
    algorithm = {"kl_coefficient": 0.3}
    batch = collate([group(completion(2, 0.5, [9, 9]))])
    one, two = trained(base, algorithm=algorithm), trained(base, algorithm=algorithm)
    assert one.runner.reference.model is one.runner.policy.model is one.model
    assert torch.equal(read(one.model, rows), read(two.model, rows))
    with one.policy.adapter.disabled():
        assert torch.equal(read(one.model, rows), read(lora(base).model, rows))
    second = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    two.runner = ModelRunner(two.runner.policy, LogprobModel.from_whole(second), two.critic, two.settings, two.ranks)
    first, other = one.step(batch, 3).metrics, two.step(batch, 3).metrics
    assert first["reference/kl"] > 0
    assert {n: v for n, v in first.items() if n != "seconds"} == {n: v for n, v in other.items() if n != "seconds"}
    assert all(torch.equal(p, two.parameters[n]) for n, p in one.parameters.items())


def test_the_divergence_at_step_0_is_0(base):
    assert lora(base, algorithm={"kl_coefficient": 0.3}).step(collate([group()]), 3).metrics["reference/kl"] == 0


@pytest.mark.parametrize("sections", [{}, {"estimator": {"name": "gae"}}], ids=["grpo", "gae"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_continues_bit_for_bit(base, tmp_path, dtype, sections):
    first = trained(base, dtype=dtype, **sections)
    checkpoint = CheckpointStore(tmp_path).save(3, first, Progress(step=3))
    assert {path.name for path in checkpoint.model.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    second = lora(base, dtype=dtype, **sections)
    checkpoint.restore(second)
    for result in (first, second):
        result.step(collate([group()]), 3)
    mine, theirs = (f.parameters | f.critic_parameters for f in (first, second))
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in mine.items())
    states = first.state(), second.state()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize(
    "train", [{"gradient_checkpointing": True}, {"packing": "on"}], ids=["computed again", "packed"]
)
def test_gradient_checkpointing_and_packing_give_the_same_step(base, train):
    """The adapter is active when the backward pass recomputes its layers, although the reference disabled it."""
    options = {"algorithm": {"kl_coefficient": 0.3}, "steps": 2}
    plain, other = trained(base, **options), trained(base, train=train, **options)
    for name, parameter in plain.parameters.items():
        assert torch.allclose(parameter, other.parameters[name], atol=TOLERANCE), name


def test_the_seed_determines_the_initial_adapter(base):
    one, two, other = lora(base), lora(base), lora(base, run={"seed": 7})
    assert all(torch.equal(p, two.parameters[n]) for n, p in one.parameters.items())
    assert not any(torch.equal(p, other.parameters[n]) for n, p in one.parameters.items() if "lora_A" in n)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_contains_the_merged_model_and_the_adapter(base, tmp_path, dtype):
    result = trained(base, dtype=dtype, weights={"transport": "files"})
    CheckpointStore(tmp_path / "checkpoints").save(3, result, Progress(step=3))
    export(tmp_path, tmp_path / "out")
    result.copy_weights()(tmp_path / "published")
    ours, theirs = (load_file(tmp_path / f / "model.safetensors") for f in ("out", "published"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)
    cards = {folder: ModelCard.load(tmp_path / "out" / folder / "README.md") for folder in ("", "adapter")}
    assert {folder: card.data.library_name for folder, card in cards.items()} == {"": "transformers", "adapter": "peft"}
    assert all("after step 3" in card.text for card in cards.values())
    with pytest.raises(SettingsError, match="penstock export"):
        find_policy_folder(tmp_path)
    assert find_policy_folder(tmp_path / "out") == tmp_path / "out"


def test_an_exported_adapter_and_the_exported_model_are_one_policy_to_peft_and_transformers(base, rows, tmp_path):
    result = trained(base)
    CheckpointStore(tmp_path / "checkpoints").save(3, result, Progress(step=3))
    export(tmp_path, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():  # peft looks up a name that transformers deprecates since 5.6
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*is_gradient_checkpointing")
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "out" / "adapter")
    trained_logprobs = read(result.model, rows)
    assert torch.allclose(whole_logprobs(adapted, rows), trained_logprobs, atol=TOLERANCE)
    assert torch.allclose(plain(tmp_path / "out", rows), trained_logprobs, atol=TOLERANCE)


def test_with_transport_adapter_only_the_adapter_is_published(base, tmp_path):
    result = trained(base, weights={"transport": "adapter"}, engine={"urls": ["http://e"]})
    before = {name: parameter.detach().clone() for name, parameter in result.parameters.items()}
    write = result.copy_weights()
    with torch.no_grad():
        for parameter in result.parameters.values():
            parameter.add_(1.0)  # as the next step would
    write(tmp_path / "v1")
    assert {p.name for p in (tmp_path / "v1").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    written = load_file(tmp_path / "v1" / "adapter_model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in before.items())


def test_only_the_target_modules_get_an_adapter(base):
    result = lora(base, more={"target_modules": ["q_proj", "layers.1.mlp.down_proj"]})
    layers = {name.removeprefix("base_model.model.model.layers.").partition(".lora")[0] for name in result.parameters}
    assert layers == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj"}


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_proj", "v_projj"], ["lora.target_modules", "'v_projj'", "q_proj, up_proj, v_proj"]),
        (["q_proj", "lm_head"], ["lora.target_modules", "'lm_head'", "leave it out"]),
        (["embed_tokens"], ["lora.target_modules", "'embed_tokens'", "leave it out"]),
        (["q_norm"], ["lora.target_modules", "q_norm|Qwen3RMSNorm"]),
    ],
)
def test_layers_that_cannot_get_an_adapter_are_refused(base, targets, words):
    with pytest.raises(SettingsError) as refused:
        lora(base, more={"target_modules": targets})
    assert all(any(part in str(refused.value) for part in word.split("|")) for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alpha": 8.0}, ["lora.alpha", "lora.rank is 0"]),
        ({"rank": 4, "target_modules": []}, ["lora.target_modules"]),
        ({"rank": 4, "target_modules": ["all-linear", "q_proj"]}, ["lora.target_modules", "all-linear"]),
    ],
)
def test_settings_that_cannot_work_are_refused(change, words):
    with pytest.raises(SettingsError) as refused:
        parse_settings(LEAST | {"lora": change})
    assert all(word in str(refused.value) for word in words)


def test_publishing_adapters_needs_a_rank_and_does_not_keep_the_kv_cache():
    with pytest.raises(SettingsError, match=r"weights\.transport is 'adapter', but lora\.rank is 0"):
        parse_settings(LEAST | {"weights": {"transport": "adapter"}})
    with pytest.raises(SettingsError, match=r"weights\.kv_cache is set, .* weights\.transport = 'adapter'"):
        parse_settings(LEAST | {"lora": {"rank": 4}, "weights": {"transport": "adapter", "kv_cache": "keep"}})


@pytest.mark.parametrize(
    ("sections", "alone"),
    [
        ({"lora": {"rank": 4}}, True),
        ({}, False),
        ({"lora": {"rank": 4}, "engine": {"server": "vllm"}}, False),
        ({"lora": {"rank": 4}, "engine": {"urls": ["http://127.0.0.1:1"]}}, False),
        ({"lora": {"rank": 4}, "weights": {"kv_cache": "keep"}}, False),
        ({"lora": {"rank": 4}, "weights": {"transport": "files"}}, False),
        ({"lora": {"rank": 4}, "engine": {"server": "vllm"}, "weights": {"transport": "adapter"}}, True),
    ],
)
def test_local_engines_of_the_run_get_the_adapter_alone_unless_settings_say_otherwise(sections, alone):
    assert parse_settings(LEAST | sections).publishes_adapters == alone


def test_an_adapter_with_other_settings_is_refused(base, bases, tmp_path):
    CheckpointStore(tmp_path / "lora").save(3, trained(base), Progress())
    CheckpointStore(tmp_path / "whole").save(0, learner(base), Progress())
    adapter, whole = (CheckpointStore(tmp_path / name).latest() for name in ("lora", "whole"))
    with pytest.raises(RunMismatchError, match=r"lora\.rank is 0"):
        adapter.restore(learner(base))
    with pytest.raises(RunMismatchError, match=r"no adapter, but lora\.rank is set"):
        whole.restore(lora(base))
    with pytest.raises(RunMismatchError, match="another rank"):
        adapter.restore(lora(base, more={"rank": 2}))
    with pytest.raises(RunMismatchError, match=r"lora\.alpha = 8, not 16"):
        adapter.restore(lora(base, more={"alpha": 16.0}))
    with pytest.raises(RunMismatchError, match="other base weights"):
        adapter.restore(lora(bases[False]))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_truncated_adapter_file_is_reported_by_name(base, tmp_path, name):
    learner = trained(base)
    learner.write_trained_weights(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-8])
    for use in (learner.policy.load_trained_weights, lambda folder: merge_adapter(folder, tmp_path)):
        with pytest.raises(RunMismatchError, match=rf"{tmp_path / name}: .*; take another checkpoint"):
            use(tmp_path)


def test_a_changed_or_missing_base_model_is_not_merged(base, tmp_path):
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    CheckpointStore(tmp_path / "run" / "checkpoints").save(3, trained(moved), Progress())
    model = AutoModelForCausalLM.from_pretrained(moved)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    shutil.rmtree(moved)
    with pytest.raises(SettingsError, match="is gone"):
        export(tmp_path / "run", tmp_path / "out")
    model.save_pretrained(moved)
    with pytest.raises(RunMismatchError, match="other base weights"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_peft_is_reported_with_the_extra(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SettingsError, match=r"pip install 'penstock\[lora\]'"):
        lora(base)
