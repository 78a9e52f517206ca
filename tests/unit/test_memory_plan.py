"""The memory of a trainer: what is predicted without weights, what is chosen by it, and what is refused."""

import contextlib
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from stream.errors import SettingsError
from tests.cases.groups import random_group
from tests.cases.models import write_small_qwen3
from workers.check import memory as check_memory_module
from workers.check.memory import check_memory, trainer_budget
from workers.check.model import ModelFacts
from workers.check.report import Checker
from workers.demo.base_models import FOLDERS
from workers.launch.specs import role_specs
from workers.role import memory as role_memory
from workers.role.memory import BUDGET, Memory, PassMemory
from workers.runs.progress import Progress
from workers.runs.warnings import read_incidents, read_warnings
from workers.settings.toml_file import parse_settings
from workers.train import worker
from workers.train.model import pass_memory
from workers.train.model.adapter import inject_adapter
from workers.train.model.lm_head import LMHead
from workers.train.model.logit_blocks import LogitTransform
from workers.train.model.logprobs import LogprobModel, logprobs_at
from workers.train.model.pass_memory import LiveBytes, MeasuredModel, measure_model
from workers.train.model.trainable_model import checkpoint_layers
from workers.train.step.batch import collate
from workers.train.step.learner import Learner
from workers.train.step.memory_plan import (
    HEADROOM,
    MAX_TOKENS,
    MIN_TOKENS,
    ModelShape,
    TrainerMemory,
    other_processes,
    plan_memory,
    rough_passes,
    with_heap_gaps,
)

pytestmark = pytest.mark.models

VOCABULARY = 2048
MB = 1_000_000
VARIANTS = {
    "full": {},
    "lora": {"lora": {"rank": 8}},
    "lora in bfloat16": {"lora": {"rank": 8}, "model": {"dtype": "bfloat16"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "recomputed": {"train": {"gradient_checkpointing": True}},
    "entropy bonus": {"algorithm": {"entropy_coefficient": 0.01}},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model whose activations are large beside its weights."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_small_qwen3(tmp_path_factory.mktemp("small"), 24, layers=2, tied=True)


def settings(folder, **sections):
    least = {"data": {"path": "none"}, "environments": {"a": "calculator"}}
    model = {"path": str(folder)} | sections.pop("model", {})
    return parse_settings(least | {"model": model} | sections)


@pytest.fixture(scope="module")
def measured(llama):
    """Return what is measured of the model with the settings of a variant, over rows apart; each once."""

    @cache
    def measure(variant):
        return measure_model(settings(llama, **VARIANTS[variant]), llama, shares=False)

    return measure


def real_peak(given, folder, rows, length):
    """Return the most bytes that a real pass holds beside weights and gradients."""
    lora = given.lora.rank
    dtype = torch.bfloat16 if lora and given.model.dtype == "bfloat16" else torch.float32
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(requires_grad=not lora)
    if lora:
        inject_adapter(model, folder, given.lora)
    if given.train.gradient_checkpointing:
        checkpoint_layers(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    read = LogprobModel(model, LMHead(model.get_output_embeddings(), LogitTransform()))
    known = [*model.parameters(), *model.buffers()]
    known += [each.grad for each in known if each.grad is not None]
    mixed = torch.autocast("cpu", torch.bfloat16) if given.model.dtype == "bfloat16" else contextlib.nullcontext()
    places = torch.arange(rows * length)
    inputs = {"input_ids": (places % VOCABULARY).view(rows, length)}
    bonus = "gradient" if given.algorithm.entropy_coefficient else "value"
    with LiveBytes(known) as meter:
        with mixed:
            found = logprobs_at(read, inputs, places, places % VOCABULARY, temperature=1.0, entropy=bonus)
        found.logprobs_N.sum().backward()
        del found
    return meter.peak


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pass_without_values_holds_what_a_real_one_does(llama, measured, variant):
    given, found = settings(llama, **VARIANTS[variant]), measured(variant)
    expected = real_peak(given, llama, 16, 256)
    assert found.passes.bytes_of(16 * 256, 256) == pytest.approx(expected, rel=0.05)
    few = real_peak(given, llama, 4, 128)
    assert found.passes.bytes_of(4 * 128, 128) >= 0.95 * few, "a block of logits is smaller then, so it may be less"


def test_a_large_vocabulary_does_not_hide_what_layers_hold(tmp_path):
    LlamaConfig(
        vocab_size=40_000, hidden_size=64, intermediate_size=192, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    given = settings(tmp_path)
    found = measure_model(given, tmp_path, shares=False).passes
    with torch.enable_grad():
        whole = pass_memory._measure_model(given, tmp_path, AutoConfig.from_pretrained(tmp_path), 12, shares=False)
    for tokens in (1024, 3072, 16384):
        assert found.bytes_of(tokens, 256) == pytest.approx(whole.passes.bytes_of(tokens, 256), rel=0.1)


def test_a_model_s_size_is_that_of_its_tensors(llama, measured):
    model = LlamaForCausalLM.from_pretrained(llama)
    found = measured("full")
    assert found.parameters == found.trained == sum(each.numel() for each in model.parameters())
    adapted = measured("lora")
    assert adapted.parameters - found.parameters == adapted.trained > 0
    assert adapted.trained <= ModelShape.read(llama).adapter_parameters(8)


def assert_is_above(bound, passes):
    for tokens in (256, 1024, 16384):
        assert bound.bytes_of(tokens, 256) >= passes.bytes_of(tokens, 256)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bound_of_a_known_architecture_is_above_what_is_measured(llama, measured, variant):
    bound = rough_passes(settings(llama, **VARIANTS[variant]), ModelShape.read(llama))
    assert_is_above(bound, measured(variant).passes)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_bound_holds_for_rows_that_share_a_prompt(name):
    given = settings(FOLDERS[name])
    assert_is_above(rough_passes(given, ModelShape.read(FOLDERS[name])), measure_model(given, FOLDERS[name]).passes)


def test_an_attention_that_stores_its_scores_takes_more_for_long_rows(llama, measured):
    eager = measure_model(settings(llama, train={"attention": "eager"}), llama, shares=False).passes
    assert eager.bytes_of(4096, 2048) > 2 * measured("full").passes.bytes_of(4096, 2048)


def trainer(**parts):
    passes = PassMemory(constant=100 * MB, per_token=MB)
    least = {"process": 500 * MB, "weights": 500 * MB, "optimizer": 0, "copies": 0, "passes": passes, "longest": 4096}
    return TrainerMemory(**least | parts)


def test_the_largest_number_of_tokens_that_leaves_some_room_is_chosen():
    budget = 4000 * MB
    tokens = trainer().choose_tokens(budget)
    room = budget * (1 - HEADROOM)
    assert trainer().peak(tokens) <= room < trainer().peak(tokens + 64)
    assert not tokens % 64
    assert trainer().choose_tokens(10**15) == MAX_TOKENS
    assert trainer().choose_tokens(1100 * MB) == 0


def test_a_run_on_one_machine_tells_its_trainer_what_the_other_processes_leave(llama, monkeypatch, tmp_path):
    monkeypatch.setattr(
        check_memory_module, "read_memory", lambda: Memory(total=6000 * MB, available=5000 * MB, source="cgroup")
    )
    own = SimpleNamespace(rss=70 * MB, shared=20 * MB)
    monkeypatch.setattr(check_memory_module.psutil.Process, "memory_info", lambda _: own)
    given = settings(llama, run={"name": "r"})
    budget = trainer_budget(given)
    others = other_processes(given, ModelShape.read(llama).parameters, ModelShape.read(llama))
    assert budget == f"{int(5050 * MB - others.total)} (cgroup)", "the supervisor is one of the others"
    specs = {each.role: each for each in role_specs(given, tmp_path, "redis://x", (), budget)}
    assert specs["train"].environment == {BUDGET: budget}
    assert BUDGET not in specs["rollout"].environment


def test_a_cache_is_counted_up_to_its_bound_and_not_beyond_what_its_slots_hold(llama):
    shape = ModelShape.read(llama)
    bounded = other_processes(settings(llama, engine={"max_cache_bytes": 1000}), 0, shape).engines
    whole = other_processes(settings(llama, engine={"max_cache_bytes": 1 << 60}), 0, shape).engines
    assert whole - bounded == shape.cache_bytes(2 * 128 * (4096 + 1024), 4) - 1000


def given_memory(monkeypatch, budget):
    monkeypatch.setenv(BUDGET, f"{int(budget)} (cgroup)")


def test_a_learner_with_much_memory_takes_the_most_tokens_and_measures_nothing(small, monkeypatch):
    monkeypatch.setattr("workers.train.step.device_memory.measure_model", None)
    given_memory(monkeypatch, 1e12)
    trained = Learner(settings(small))
    assert trained.micro_batch_tokens == MAX_TOKENS
    assert trained.choice.text.startswith(f"micro_batch_tokens = {MAX_TOKENS:,} chosen: weights ")


def test_a_learner_with_little_memory_takes_fewer_tokens_and_says_why(llama, monkeypatch):
    held = (
        Learner(settings(llama, train={"micro_batch_tokens": 1})).plan_memory(PassMemory(constant=0, per_token=1)).fixed
    )
    given_memory(monkeypatch, (held + 300 * MB) / (1 - HEADROOM))
    trained = Learner(settings(llama))
    assert MIN_TOKENS < trained.micro_batch_tokens < MAX_TOKENS
    assert "per token" in trained.choice.text
    assert trained.choice.text.endswith("of memory (cgroup)")
    assert trained.choice.allows(trained.micro_batch_tokens + 64), "the room that is left free is not forbidden"
    assert not trained.choice.allows(MAX_TOKENS)


def test_a_learner_with_too_little_memory_is_refused_with_figures(llama, monkeypatch):
    given_memory(monkeypatch, 100 * MB)
    with pytest.raises(SettingsError, match=r"the trainer needs .* for passes over 256 tokens .* and has 100 MB"):
        Learner(settings(llama))


def test_a_number_in_the_settings_is_used_as_it_is(small, monkeypatch):
    given_memory(monkeypatch, 1)
    trained = Learner(settings(small, train={"micro_batch_tokens": 77}))
    assert (trained.micro_batch_tokens, trained.choice) == (77, None)


def settle(folder, trained, recorded):
    progress = Progress(step=5, micro_batch_tokens=recorded)
    worker._settle_micro_batches(folder, trained, progress)
    return progress.micro_batch_tokens, [each.text for each in read_warnings(folder, 0)[0]]


def test_what_is_chosen_is_recorded_and_said_but_is_no_warning(small, tmp_path, monkeypatch):
    given_memory(monkeypatch, 1e12)
    trained = Learner(settings(small))
    recorded, notes = settle(tmp_path, trained, [])
    assert recorded == [(5, MAX_TOKENS)]
    assert notes == [trained.choice.text]
    assert read_incidents(tmp_path, 5) == []


def test_a_resumed_run_keeps_its_tokens_while_they_fit(small, tmp_path, monkeypatch):
    given_memory(monkeypatch, 1e12)
    trained = Learner(settings(small))
    assert settle(tmp_path, trained, [(0, 640)]) == ([(0, 640)], ["micro_batch_tokens = 640 as before"])
    assert trained.micro_batch_tokens == 640


def test_a_resumed_run_with_less_memory_takes_fewer_tokens_and_records_from_when(small, tmp_path, monkeypatch):
    given_memory(monkeypatch, 1e12)
    trained = Learner(settings(small))
    trained.choice = replace(trained.choice, tokens=128, budget=1.0)
    trained.use_micro_batch_tokens(128)
    recorded, (note,) = settle(tmp_path, trained, [(0, 640)])
    assert recorded == [(0, 640), (5, 128)]
    assert note.endswith("it was 640, which does not fit into this memory")


def test_tokens_of_a_pass_change_only_rounding(small):
    batch = collate([random_group(n, 3, vocabulary=24, rewards=[0.0, 1.0, 0.0, 1.0]) for n in range(3)])
    one, other = (Learner(settings(small, train={"learning_rate": 1e-2})) for _ in range(2))
    other.use_micro_batch_tokens(8)
    for each in (one, other):
        each.step(batch, version=3)
    for name, weight in one.parameters.items():
        torch.testing.assert_close(weight, other.parameters[name], rtol=1e-3, atol=1e-5)


SHORT = {"max_tokens": 256}


def known_model(given, _folder):
    """Return what `measure_model` returned of this model: a refusal measures several settings, which takes a while."""
    lora, layers = given.lora.rank, 1.0
    if given.train.gradient_checkpointing:
        layers = 0.02
    elif given.model.dtype == "bfloat16":
        layers = 0.65
    return MeasuredModel(
        parameters=139_400_000 if lora else 134_500_000,
        trained=4_900_000 if lora else 134_500_000,
        passes=PassMemory(constant=(200 if lora else 264) * MB, per_token=(1.41 if lora else 1.53) * MB * layers),
    )


def found_by_check(folder, monkeypatch, available, measure=known_model, **sections):
    """Return the findings of a check on a machine with `available` bytes of free memory."""
    monkeypatch.setattr(check_memory_module, "_HAS_GPU", False)
    monkeypatch.setattr(pass_memory, "measure_model", measure)
    memory = Memory(total=available, available=available, source="cgroup")
    for module in (check_memory_module, role_memory):
        monkeypatch.setattr(module, "read_memory", lambda: memory)
    own = SimpleNamespace(rss=0, shared=0)
    monkeypatch.setattr(check_memory_module.psutil.Process, "memory_info", lambda _: own)
    checker = Checker(settings(folder, **sections))
    check_memory(checker, ModelFacts(parameters=135 * MB, max_positions=0))
    return checker.findings


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    """The configuration of a model of 135 million parameters; it needs no weights to be measured."""
    folder = tmp_path_factory.mktemp("smol")
    LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_a_run_that_cannot_fit_is_refused_with_figures_and_what_helps_most(smol, monkeypatch):
    (error,) = found_by_check(smol, monkeypatch, 4_000 * MB, rollout=SHORT)
    assert error.level == "error"
    # 134.5 million parameters: weights .54, optimizer 1.61, copies 1.08, a pass .66, process .49,
    # an engine 1.72 with a cache of .25, others .60
    assert error.message.startswith("with the smallest passes (256 tokens) the run needs 6.7 GB: trainer 4.4 GB (")
    assert "4.0 GB available (cgroup)" in error.message
    assert error.remedy.startswith("[lora] rank = 16 helps most: the run then needs 4.4 GB, which is still too much")


def test_a_large_cache_that_was_asked_for_is_what_to_lower(smol, monkeypatch):
    engine = {"max_cache_bytes": 6_000_000_000}
    (error,) = found_by_check(smol, monkeypatch, 8_000 * MB, rollout={"max_tokens": 4096}, engine=engine)
    assert error.remedy.startswith("engine.max_cache_bytes = 200_000_000 helps most: the run then needs 6.")


def test_an_adapter_that_is_published_whole_is_told_what_helps(smol, monkeypatch):
    own = {"lora": {"rank": 16}, "weights": {"transport": "files"}, "rollout": SHORT, "model": {"dtype": "bfloat16"}}
    (error,) = found_by_check(smol, monkeypatch, 3_600 * MB, **own)
    assert error.remedy.startswith("weights.transport = 'adapter' helps most: the run then needs 3.")


def test_the_cache_of_an_engine_is_a_part_of_the_memory(monkeypatch):
    for total, expected in ((4 << 30, 1 << 28), (100 << 30, 2_000_000_000)):
        memory = Memory(total=total, available=total, source="machine")
        monkeypatch.setattr(role_memory, "read_memory", lambda memory=memory: memory)
        assert role_memory.engine_cache_bytes("auto") == expected
    assert role_memory.engine_cache_bytes(5) == 5


def test_gaps_of_the_heap_are_those_of_an_adapter_on_a_cpu_and_bounded(smol):
    passes = PassMemory(constant=1, per_token=1000)
    assert with_heap_gaps(settings(smol), passes) == passes
    adapted = with_heap_gaps(settings(smol, lora={"rank": 16}), passes)
    half = with_heap_gaps(settings(smol, lora={"rank": 16}, model={"dtype": "bfloat16"}), passes)
    gaps = [adapted.bytes_of(tokens, 100) - passes.bytes_of(tokens, 100) for tokens in (100, 4096, 10_000)]
    assert gaps == [100 * adapted.gaps_per_token, 4096 * adapted.gaps_per_token, 4096 * adapted.gaps_per_token]
    assert half.gaps_per_token == adapted.gaps_per_token / 2 > 0


def test_an_adapter_helps_most_where_the_engine_is_elsewhere(smol, monkeypatch):
    elsewhere = {"rollout": SHORT, "engine": {"urls": ["http://127.0.0.1:1"]}}
    (error,) = found_by_check(smol, monkeypatch, 4_000 * MB, **elsewhere)
    assert error.remedy.startswith("[lora] rank = 16 helps most: the run then needs ")
    assert "still too much" not in error.remedy


@pytest.mark.full
def test_an_adapter_that_cannot_fit_is_refused_too(smol, monkeypatch):
    (error,) = found_by_check(smol, monkeypatch, 2_147 * MB, measure=measure_model, lora={"rank": 16}, rollout=SHORT)
    assert error.level == "error"
    assert "lora" not in error.remedy


def test_a_number_of_tokens_that_cannot_fit_is_named(smol, monkeypatch):
    own = {"lora": {"rank": 16}, "rollout": SHORT, "train": {"micro_batch_tokens": 16384}}
    (error,) = found_by_check(smol, monkeypatch, 20_000 * MB, **own)
    assert (error.level, error.place) == ("error", "train.micro_batch_tokens")
    assert error.message.startswith("with passes over 16,384 tokens the run needs 3")
    assert error.remedy.startswith('train.micro_batch_tokens = "auto" helps most')


def test_a_completion_that_may_become_too_long_is_a_warning(smol, monkeypatch):
    (warning,) = found_by_check(smol, monkeypatch, 9_000 * MB, lora={"rank": 16})
    assert warning.level == "warning"
    assert warning.message.startswith("a completion of 5,120 tokens, the longest that the settings allow, needs ")


def test_enough_memory_is_no_finding_and_loads_no_torch(smol, monkeypatch):
    assert not found_by_check(smol, monkeypatch, 100_000 * MB, measure=None, lora={"rank": 16}, rollout=SHORT)


def test_what_a_plan_counts(smol):
    passes = PassMemory(constant=0, per_token=1)
    full = plan_memory(settings(smol), parameters=100, trained=100, passes=passes, process=0)
    assert (full.weights, full.optimizer, full.copies) == (400, 1200, 800)
    lora = settings(smol, lora={"rank": 8}, model={"dtype": "bfloat16"})
    adapted = plan_memory(lora, parameters=110, trained=10, passes=passes, process=0)
    assert (adapted.weights, adapted.optimizer) == (240, 120)
    with_reference = settings(smol, algorithm={"kl_coefficient": 0.1})
    assert plan_memory(with_reference, parameters=100, trained=100, passes=passes).weights == 800
