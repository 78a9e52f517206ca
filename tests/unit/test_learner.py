"""One step of the learner on a small Qwen3: what changes the weights, what must not, and what is written."""

import math
import shutil
from array import array
from functools import partial

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stream.errors import RunMismatchError, SettingsError
from stream.records import Group, Prompt
from stream.validity import DropReason, RewardReason, TruncationReason, Unmeasured
from tests.cases import groups
from tests.cases.models import loaded_once, write_small_qwen3
from workers.local_engine.weights import load_weights
from workers.runs.tokens import token_columns, trained_row
from workers.settings.toml_file import parse_settings
from workers.train.model.logprobs import token_logprobs
from workers.train.step.batch import collate
from workers.train.step.group_checks import check_group
from workers.train.step.learner import Learner
from workers.train.step.optimizer import learning_rate_factor
from workers.train.step.step_metrics import STEP_METRICS

pytestmark = pytest.mark.models

VOCABULARY = 24


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model folder with a file that resembles a tokenizer's."""
    folder = write_small_qwen3(tmp_path_factory.mktemp("base"), VOCABULARY, layers=2, tied=True)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("not of the model")
    with loaded_once():
        yield folder


def learner(base, *, dtype="float32", learning_rate=1e-2, train=None, **sections):
    """Make a learner with the required settings and these sections."""
    least = {"data": {"path": "none"}, "environments": {"a": "calculator"}}
    train = {"learning_rate": learning_rate, "max_grad_norm": 1e9} | (train or {})
    return Learner(parse_settings(least | {"model": {"path": str(base), "dtype": dtype}, "train": train} | sections))


GOOD, BAD = [3, 4, 0, 5], [6, 7, 8]
completion = partial(groups.completion, version=3, logprobs=(-3.0,))


def group(*others, name="p"):
    return groups.group(completion(0, 1.0, GOOD), completion(1, 0.0, BAD), *others, name=name)


def logprob(trained, tokens):
    """Return the learner's log-prob of the sampled tokens after the prompt."""
    ids = torch.tensor([[1, 2, *tokens]])
    with torch.no_grad():
        return float(
            token_logprobs(trained.runner.policy, ids, (ids != 0) & (ids > 2), temperature=1.0).logprobs_N.sum()
        )


def weights(trained):
    return torch.cat([p.detach().flatten().clone() for p in trained.parameters.values()])


def test_a_step_makes_the_better_completion_likelier(base):
    trained = learner(base)
    before = logprob(trained, GOOD), logprob(trained, BAD)
    report = trained.step(collate([group()]), 3)
    assert report.trained
    assert not report.skipped
    assert logprob(trained, GOOD) > before[0]
    assert logprob(trained, BAD) < before[1]


def test_the_micro_batch_does_not_change_the_step(base):
    batch = collate([group(completion(2, 0.5, [3, 3, 3, 3, 3, 9])), group(name="q")])
    one, many = learner(base, learning_rate=1e-3), learner(base, learning_rate=1e-3, train={"micro_batch_tokens": 1})
    first, second = one.step(batch, 3), many.step(batch, 3)
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert first.metrics["grad_norm"] == pytest.approx(second.metrics["grad_norm"], rel=1e-4)
    assert first.metrics["entropy"] == pytest.approx(second.metrics["entropy"], rel=1e-5)


def test_invalid_completions_train_nothing(base):
    bad = completion(2, Unmeasured(RewardReason.RAISED), [9, 9])
    cut = completion(3, 7.0, [10, 10], truncated=TruncationReason.WALL_CLOCK)
    nan = completion(4, 7.0, [11, 11])
    nan.rows[0].logprobs = array("f", [math.nan] * 2).tobytes()
    clean, dirty = learner(base), learner(base)
    one, other = clean.step(collate([group()]), 3), dirty.step(collate([group(bad, cut, nan)]), 3)
    assert torch.equal(weights(clean), weights(dirty))
    assert one.loss == other.loss
    assert other.metrics["tokens/loss"] == one.metrics["tokens/loss"] == 6
    assert other.metrics["rows/reward:raised"] == other.metrics["rows/truncated:wall_clock"] == 1
    done = other.completions["p"]
    assert done[:2] == one.completions["p"]
    assert [each.state for each in done[:4]] == ["valid", "valid", "reward:raised", "truncated:wall_clock"]
    assert [each.loss_tokens for each in done] == [3, 3, 0, 0, 0]
    assert [each.advantage for each in done[2:]] == [None] * 3
    assert [each.advantage for each in done[:2]] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-3)


def test_a_step_reports_what_it_did_with_each_sampled_token(base):
    first = group(completion(2, Unmeasured(RewardReason.RAISED), [9, 10]))
    differences = []
    with torch.no_grad():
        for tokens in (GOOD, BAD):
            ids = torch.tensor([[1, 2, *tokens]])
            policy = learner(base).runner.policy
            own_N = token_logprobs(policy, ids, (ids != 0) & (ids > 2), temperature=1.0).logprobs_N
            differences.append((own_N + 3.0).tolist())
    bound = math.exp(-sorted(differences[0] + differences[1])[2])  # ratio engine to trainer that two tokens exceed
    reject = {"token_k1": [0.0, bound * 1.0001]}
    report = learner(base, correction={"reject": reject}, filter={"min_valid_rows": 2}).step(collate([first]), 3)
    *valid, invalid = report.completions["p"]
    for done, given, known in zip(valid, first.completions[:2], differences, strict=True):
        columns = token_columns(given.rows[0], trained_row(done, 0))
        sampled = [at for at, value in enumerate(columns.sampled_mask) if value]
        rejected = [math.exp(-difference) > bound * 1.0001 for difference in known]
        assert [columns.logprob_differences[at] for at in sampled] == pytest.approx(known, abs=1e-4)
        assert [columns.rejected_by[at] for at in sampled] == ["token_k1" if each else None for each in rejected]
        assert [columns.loss_mask[at] for at in sampled] == [not each for each in rejected]
        assert sum(columns.loss_mask) == done.loss_tokens
        assert [columns.advantages[at] for at in sampled] == [
            None if each else pytest.approx(done.advantage) for each in rejected
        ]
    assert sum(done.loss_tokens for done in valid) == 4
    columns = token_columns(first.completions[2].rows[0], trained_row(invalid, 0))
    assert (columns.loss_mask, columns.advantages, columns.rejected_by) == ([0, 0], [None] * 2, [None] * 2)
    assert columns.logprob_differences == [None] * 2
    without = learner(base, archive={"keep": "none"}).step(collate([first]), 3)
    assert all(each.rows == () for each in without.completions["p"])


def test_a_batch_without_valid_rows_changes_no_weight_and_is_reported(base):
    trained = learner(base)
    before = weights(trained)
    nothing = Group(
        prompt=Prompt(id="p", messages=[]), completions=[completion(0, Unmeasured(RewardReason.TIMEOUT), GOOD)]
    )
    report = trained.step(collate([nothing]), 3)
    assert (report.trained, report.skipped, report.loss) == (False, "no_valid_row", 0.0)
    assert torch.equal(weights(trained), before)
    assert report.metrics["trained"] == 0
    assert "reward/mean" not in report.metrics
    assert trained.step(collate([]), 3).skipped == "no_valid_row"


def test_a_gradient_that_is_not_finite_is_never_applied(base):
    trained = learner(base, estimator={"name": "dr_grpo"}, train={"updates_per_batch": 2})
    trained.step(collate([group()]), 3)
    before, state = weights(trained), {name: value.clone() for name, value in trained.state().items()}
    huge = group(completion(2, 1e300, [9]))
    report = trained.step(collate([huge]), 3)
    assert (report.trained, report.skipped, trained.skipped_steps) == (False, "gradient_not_finite", 1)
    assert torch.equal(weights(trained), before)
    assert all(torch.equal(state[name], value) for name, value in trained.state().items())
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert trained.step(collate([group()]), 3).trained


def test_the_same_batches_give_the_same_weights(base):
    one, other = learner(base), learner(base)
    for _ in range(3):
        one.step(collate([group()]), 3)
        other.step(collate([group()]), 3)
    assert torch.equal(weights(one), weights(other))


def test_a_recomputed_proximal_policy_is_the_policy_before_the_first_update(base):
    batch = collate([group()])
    first = learner(base).step(batch, 3).metrics
    assert not [name for name in first if name.startswith(("ratio/", "kl/", "clip_fraction"))]
    assert first["correction/rollout_is_mean"] != 1.0
    still = learner(base, train={"updates_per_batch": 2, "learning_rate": 0.0}).step(batch, 3).metrics
    assert still["ratio/mean"] == still["ratio/max"] == 1.0
    assert still["kl/k1"] == still["kl/k3"] == 0.0
    twice = learner(base, train={"updates_per_batch": 2}).step(batch, 3).metrics
    assert twice["ratio/max"] > 1.0
    assert twice["kl/k3"] > 0.0
    assert twice["correction/kl"] == pytest.approx(first["correction/kl"])
    assert twice["entropy"] == pytest.approx(first["entropy"])


def test_two_updates_of_a_batch_equal_two_steps_of_one(base):
    """No update sees the gradient of the update before."""
    engine_is_proximal = {"algorithm": {"proximal": "engine"}, "correction": {"weights": "none"}}
    once = learner(base, train={"updates_per_batch": 2}, **engine_is_proximal)
    twice = learner(base, **engine_is_proximal)
    once.step(collate([group()]), 3)
    for _ in range(2):
        twice.step(collate([group()]), 3)
    assert torch.equal(weights(once), weights(twice))


def test_the_engine_can_be_the_proximal_policy(base):
    chosen = {"algorithm": {"proximal": "engine"}, "correction": {"weights": "none"}}
    metrics = learner(base, **chosen).step(collate([group()]), 3).metrics
    assert "correction/rollout_is_mean" not in metrics
    assert metrics["kl/k1"] == pytest.approx(metrics["correction/kl"], rel=1e-5)
    assert metrics["ratio/mean"] != 1.0


def test_tokens_above_max_token_age_are_masked_and_counted(base):
    young = completion(2, 0.5, [9, 9, 9], version=8)
    metrics = learner(base, pacing={"max_token_age": 4}).step(collate([group(young)]), 9).metrics
    assert (metrics["tokens/too_old"], metrics["tokens/loss"], metrics["tokens/sampled"]) == (6, 3, 9)
    assert metrics["staleness/max"] == 1


def test_weight_decay_excludes_norm_weights(base):
    trained = learner(base, train={"weight_decay": 0.5})
    decays = {id(p): group["weight_decay"] for group in trained.optimizer.adamw.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in trained.parameters.items()} == {
        name: 0.5 if p.ndim > 1 else 0.0 for name, p in trained.parameters.items()
    }


def test_a_large_model_is_written_to_several_files_that_engine_and_trainer_read(base, tmp_path, monkeypatch):
    monkeypatch.setattr("workers.train.model.policy_folder._LARGEST_FILE", "4KB")
    trained = learner(base)
    trained.step(collate([group()]), 3)
    trained.copy_weights()(tmp_path / "v1")
    assert len(list((tmp_path / "v1").glob("*.safetensors"))) > 1
    served, again = AutoModelForCausalLM.from_pretrained(base), learner(base)
    load_weights(served, tmp_path / "v1")
    again.restore(tmp_path / "v1", trained.state(), steps=1)
    for name, parameter in served.named_parameters():
        assert torch.equal(parameter, trained.parameters[name])
        assert torch.equal(parameter, again.parameters[name])


def test_the_learning_rate_follows_its_schedule(base):
    trained = learner(base, learning_rate=1.0, train={"schedule": "linear", "max_steps": 4, "warmup_steps": 1})
    rates = [trained.step(collate([]), 3).metrics["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([1.0, 1.0, 2 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [0.5, 1, 1, 0.8535534, 0.5, 0.1464466, 0, 0]),
    ],
)
def test_the_schedule_factor_after_two_warm_up_steps(schedule, expected):
    results = [learning_rate_factor(step, schedule=schedule, warmup_steps=2, total_steps=6) for step in range(8)]
    assert results == pytest.approx(expected)


def test_a_decaying_learning_rate_requires_max_steps(base):
    with pytest.raises(SettingsError, match=r"train\.max_steps"):
        learner(base, train={"schedule": "cosine"})
    with pytest.raises(ValueError, match="must know where it ends"):
        learning_rate_factor(0, schedule="linear", warmup_steps=0, total_steps=0)


def test_a_folder_without_a_model_is_refused_with_its_name(tmp_path):
    with pytest.raises(SettingsError, match=r"no config\.json.*model\.path"):
        learner(tmp_path)


def test_written_weights_equal_the_trained_ones(base, tmp_path):
    trained = learner(base)
    trained.step(collate([group()]), 3)
    expected = weights(trained)
    write = trained.copy_weights()
    trained.step(collate([group()]), 3)  # the next step leaves the copy as it is
    write(tmp_path / "v1")
    assert {p.name for p in (tmp_path / "v1").iterdir()} == {
        *["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    result = torch.cat([p.detach().flatten() for p in loaded.parameters()])
    assert torch.equal(result, expected)
    assert not torch.equal(result, weights(learner(base)))
    assert not torch.equal(result, weights(trained))


def test_an_existing_folder_is_not_overwritten(base, tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "mine").write_text("x")
    with pytest.raises(FileExistsError):
        learner(base).copy_weights()(tmp_path / "v1")
    assert [p.name for p in tmp_path.rglob("*")] == ["v1", "mine"]


def test_weights_are_written_in_bfloat16_and_kept_in_float32(base, tmp_path):
    trained = learner(base, dtype="bfloat16", learning_rate=1e-6)
    before = weights(trained)
    assert trained.step(collate([group()]), 3).trained
    assert not torch.equal(weights(trained), before)
    trained.copy_weights()(tmp_path / "v1")
    written = load_file(tmp_path / "v1" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in written
    assert msgspec.json.decode((tmp_path / "v1" / "config.json").read_bytes())["dtype"] == "bfloat16"
    assert torch.equal(trained.state()["master.model.norm.weight"], trained.parameters["model.norm.weight"])


def test_every_metric_is_documented(base):
    odd = completion(2, 1.0, [9], truncated=TruncationReason.LENGTH)
    metrics = {}
    for loss in ({"name": "clipped", "dual_clip": 3.0}, {"name": "kl_cov"}):
        sections = {"algorithm": {"kl_coefficient": 0.1}, "train": {"updates_per_batch": 2}}
        result = learner(base, estimator={"name": "gae"}, loss=loss, **sections)
        filtered = [check_group(group(name="f"), result.settings, 3, VOCABULARY).rewards]
        dropped = {DropReason.ZERO_VARIANCE: 2}
        metrics |= result.step(collate([group(odd)]), 3, filtered=filtered, dropped=dropped).metrics
    families = tuple(name.removesuffix("*") for name in STEP_METRICS if name.endswith("*"))
    assert [name for name in metrics if name not in STEP_METRICS and not name.startswith(families)] == []
    of_branches = {"branches/compactions"}  # test_branched_rollouts
    assert [n for n in STEP_METRICS if not n.endswith("*") and n not in metrics.keys() | of_branches] == []


def test_a_restored_critic_continues_exactly(base, tmp_path):
    """Weights, optimizer and critic: a restored learner steps to the same weights as an uninterrupted one."""
    one = learner(base, estimator={"name": "gae"})
    one.step(collate([group()]), 3)
    one.copy_weights()(tmp_path / "weights")
    other = learner(base, estimator={"name": "gae"})
    other.restore(tmp_path / "weights", one.state(), steps=one.steps)
    values = [report.metrics["value/mean"] for report in (t.step(collate([group()]), 3) for t in (one, other))]
    assert values[0] == values[1] != 0.0
    assert torch.equal(weights(one), weights(other))
    for name, parameter in one.critic_parameters.items():
        assert torch.equal(parameter, other.critic_parameters[name]), name


def test_a_checkpoint_without_a_critic_is_refused(base, tmp_path):
    plain = learner(base)
    plain.step(collate([group()]), 3)
    plain.copy_weights()(tmp_path / "weights")
    with pytest.raises(RunMismatchError, match="no such critic"):
        learner(base, estimator={"name": "gae"}).restore(tmp_path / "weights", plain.state(), steps=1)


def test_the_critic_learns_the_returns(base):
    trained = learner(base, estimator={"name": "gae", "critic_learning_rate": 0.05}, learning_rate=0.0)
    errors = [trained.step(collate([group()]), 3).metrics["value/error"] for _ in range(20)]
    assert errors[-1] < errors[0] / 2


def test_entropy_is_reported_for_the_first_pass_only(base):
    chosen = {"algorithm": {"entropy_coefficient": 0.01}}
    once, twice = learner(base, **chosen), learner(base, **chosen, train={"updates_per_batch": 2})
    results = [trained.step(collate([group()]), 3).metrics["entropy"] for trained in (once, twice, learner(base))]
    assert results[0] == pytest.approx(results[1]) == pytest.approx(results[2])


def test_an_entropy_bonus_raises_entropy_and_a_divergence_holds_the_policy_back(base):
    def after(**algorithm):
        trained = learner(base, algorithm=algorithm, train={"updates_per_batch": 4})
        return [trained.step(collate([group()]), 3).metrics for _ in range(3)][-1]

    assert after(entropy_coefficient=1.0)["entropy"] > after()["entropy"]
    held, free = after(kl_coefficient=10.0), after(kl_coefficient=1e-9)
    assert held["reference/kl"] < free["reference/kl"] / 2


@pytest.mark.parametrize("files", [1, 3])
def test_a_model_with_a_truncated_file_is_refused_with_the_files_name(base, tmp_path, files):
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path, max_shard_size="5GB" if files == 1 else "4kB")
    *_, last = sorted(tmp_path.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(SettingsError, match=rf"{last}: .*; copy it again"):
        learner(tmp_path)


def test_a_model_with_a_missing_weight_is_refused_instead_of_initialized(base, tmp_path):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    weights = load_file(base / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    lacks = r"not a complete causal model: its files lack the weights model\.layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(SettingsError, match=rf"{tmp_path}: .*{lacks}"):
        learner(tmp_path)


def test_a_folder_with_an_unsuitable_model_is_refused_with_the_reason(base, tmp_path):
    with pytest.raises(SettingsError, match=r"no config\.json"):
        learner(tmp_path)
    shutil.copyfile(base / "config.json", tmp_path / "config.json")
    with pytest.raises(SettingsError, match=rf"{tmp_path}: .*model\.safetensors.*; copy it again, or set model\.path"):
        learner(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen99"}')
    with pytest.raises(SettingsError, match=rf"{tmp_path}: .*qwen99.*; copy it again, or set model\.path"):
        learner(tmp_path)
