"""The model card of an export: what the hub reads of it, what people read, and that no text breaks it."""

import tomllib

import msgspec
import pytest
from huggingface_hub import ModelCard

from stream.codec import encode
from stream.records import Completion, Group, Prompt, Row, Span
from stream.validity import Measured, RewardReason, Unmeasured
from workers.runs.evaluations import FILE, EvaluationResult, mean_interval, write_groups
from workers.runs.progress import Progress
from workers.score.worker import evaluate_group
from workers.settings.toml_file import dump_settings, parse_settings
from workers.train.checkpointing.markdown import fenced, render_card
from workers.train.checkpointing.model_card import write_cards
from workers.train.evaluations import summarize

TABLE = {
    "run": {"name": "sums", "seed": 7, "redis": "redis://user:hunter2@server:6379/0"},
    "model": {"path": "m"},
    "data": {"path": "train.jsonl"},
    "rewards": [{"ref": "exact.py:exact", "args": {"api_key": "hunter3"}}],
    "estimator": {"name": "rloo"},
    "train": {"batch_size": 12, "max_steps": 24},
    "eval": {"path": "held_out.jsonl", "group_size": 4},
}
PROGRESS = Progress(
    step=24,
    version=24,
    groups=288,
    tokens=9_000,
    completion_states={"failed:engine": 3, "valid": 90, "reward:missing": 7},
)
EVIL = "a\n---\nlicense: mit\n---\n| b | <script>x</script> `c` ``` [d](e) *f*\x00"


def completion(index, reward, version=24):
    row = Row(
        prompt_ids=bytes(4), token_ids=bytes(4), sampled_ranges=[(0, 1)], logprobs=bytes(4), spans=[Span(version, 0, 1)]
    )
    return Completion(index=index, rows=[row], reward=reward)


def group(name, *rewards, version=24):
    values = [completion(i, Measured(float(reward)), version) for i, reward in enumerate(rewards)]
    return Group(prompt=Prompt(id=name, messages=[], environment="e"), completions=values)


def evaluate(folder, step, rewards, settings):
    """Write an evaluation as the trainer does; `rewards` has the rewards of each prompt's completions."""
    groups = [group(name, *values, version=step) for name, values in rewards.items()]
    evaluations = {each.prompt.id: evaluate_group(each, step, settings) for each in groups}
    prompts = {each.prompt.id: ("e", len(each.completions)) for each in groups}
    overall, by_environment = summarize(evaluations, prompts)
    result = EvaluationResult(
        version=step, step=step, time=0.0, seconds=1.0, overall=overall, environments=by_environment
    )
    with (folder / FILE).open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")
    write_groups(folder, step, [encode(each) for each in groups])


def card(folder, table=TABLE, progress=PROGRESS, **sections):
    """Write a run's settings and the card of its step 24; return what the hub's client reads of it."""
    run, out = folder / "run", folder / "out"
    run.mkdir(exist_ok=True)
    out.mkdir(exist_ok=True)
    (run / "run.toml").write_text(dump_settings(parse_settings(table | sections)))
    write_cards(run, out, 24, progress)
    return ModelCard.load(out / "README.md")


def toml_of(text):
    return tomllib.loads(text.partition("```toml\n")[2].partition("\n```")[0])


def test_the_metadata_have_scores_with_seed_and_interval(tmp_path):
    (tmp_path / "run").mkdir()
    settings = parse_settings(TABLE)
    evaluate(tmp_path / "run", 0, {"a": (0, 0), "b": (1, 0)}, settings)
    evaluate(tmp_path / "run", 24, {"a": (1, 0, 0, 0), "b": (1, 1, 1, 0)}, settings)
    made = card(tmp_path)
    metadata = made.data.to_dict()
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "text-generation"
    assert metadata["tags"] == ["penstock", "reinforcement-learning", "rloo"]
    (mean, *passed) = made.data.eval_results
    assert (made.data.model_name, mean.metric_type, mean.metric_value) == ("sums", "mean_reward", 0.5)
    assert mean.dataset_name == "held_out.jsonl"
    assert mean.metric_args["seed"] == 7
    assert mean.metric_args["interval_95"] == pytest.approx(
        [0.01, 0.99]
    )  # 1.96 * sqrt((1 + 1) * 2 / 1) / 8 to each side
    assert {each.metric_type: each.metric_value for each in passed} == {"pass@1": 0.5, "pass@2": 0.75, "pass@4": 1.0}
    assert "| step 0 | all | 2 | 4 of 4 | 0.250 |" in made.text
    assert "| step 24 | all | 2 | 8 of 8 | 0.500 | 0.010 to 0.990 |" in made.text


def test_the_weights_of_another_step_lend_no_score(tmp_path):
    (tmp_path / "run").mkdir()
    for step in (0, 20):
        evaluate(tmp_path / "run", step, {"a": (1, 0), "b": (1, 0)}, parse_settings(TABLE))
    made = card(tmp_path)
    assert made.data.eval_results is None
    assert "The exported weights have no score." in made.text
    assert "step 20" not in made.text


def test_completions_are_counted_by_state_with_the_reason(tmp_path):
    rows = [line for line in card(tmp_path).text.splitlines() if line.count("%") == 1]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| valid", "90", "90.00%"],
        ["| reward:missing", "7", "7.00%"],
        ["| failed:engine", "3", "3.00%"],
    ]
    assert "not evaluated on held-out prompts" in card(tmp_path).text


def test_the_settings_of_the_card_make_the_same_run_and_tell_no_secret(tmp_path):
    text = card(tmp_path).text
    assert "hunter" not in text
    assert "server:6379" not in text
    assert "penstock export sums OUT --which 24" in text
    table = toml_of(text)
    assert table["train"] == {"batch_size": 12, "max_steps": 24}
    assert table["rewards"] == [{"ref": "exact.py:exact", "args": {"api_key": "(hidden)"}}]
    known = {
        **TABLE,
        "run": {"name": "sums", "seed": 7},
        "rewards": [{"ref": "exact.py:exact", "args": {"api_key": "(hidden)"}}],
    }
    assert parse_settings(table) == parse_settings(known)


def test_options_of_another_estimator_are_kept_even_if_they_equal_those_of_the_default(tmp_path):
    named = parse_settings(TABLE | {"estimator": {"name": "rloo"}}).estimator
    assert toml_of(card(tmp_path).text)["estimator"] == {"name": "rloo", **named.options}


def test_texts_of_users_break_neither_yaml_nor_markdown(tmp_path):
    made = card(
        tmp_path,
        data={"path": EVIL},
        eval={"path": EVIL},
        rewards=[{"ref": "r.py:f", "name": EVIL}],
        progress=msgspec.structs.replace(PROGRESS, completion_states={"valid": 1, f"reward:{EVIL}": 1}),
    )
    assert made.data.license is None
    assert made.text.lstrip().startswith("# sums")
    prose = made.text.partition("```")[0]
    assert "<script>" not in prose.replace("\\<", "")
    tables = [line for line in prose.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} == {3, 5}
    assert toml_of(made.text.replace("````toml", "```toml"))["data"]["path"] == EVIL
    assert "\x00" not in made.text


def test_a_fence_is_longer_than_any_in_the_code():
    assert fenced("a ```` b", "sh") == "`````sh\na ```` b\n`````"


def test_license_language_and_origin_come_from_the_base_models_own_card(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: en\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\n---\n# Base\n"
    )
    metadata = card(tmp_path, model={"path": str(base)}).data.to_dict()
    assert metadata["license"] == "apache-2.0"
    assert metadata["language"] == ["en"]
    assert metadata["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    "front", ["license: [", "- a", "license: {a: b}\nbase_model: 3\nlanguage: [1, {}]", "license: 'x\n\n  ---\n\n  y'"]
)
def test_a_damaged_card_of_the_base_model_says_nothing(tmp_path, front):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(f"---\n{front}\n---\n# Base\n")
    metadata = card(tmp_path, model={"path": str(base)}).data.to_dict()
    assert not {"license", "language", "base_model"} & metadata.keys()


def test_a_model_from_the_hubs_cache_is_named_as_on_the_hub(tmp_path):
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    assert card(tmp_path, model={"path": str(folder)}).data.base_model == "Qwen/Qwen3-0.6B"


def test_model_and_data_that_were_named_on_the_hub_are_named_in_the_card(tmp_path):
    bound = f"main@{'a' * 40}"
    made = card(
        tmp_path,
        model={"path": "Qwen/Qwen3-0.6B", "revision": bound},
        data={"path": "openai/gsm8k", "split": "train", "revision": bound},
    )
    assert (made.data.base_model, made.data.datasets) == ("Qwen/Qwen3-0.6B", ["openai/gsm8k"])


def test_a_folder_that_looks_like_a_name_of_the_hub_is_not_taken_for_one(tmp_path):
    assert card(tmp_path, model={"path": "models/gone"}).data.base_model is None


def test_a_run_without_readable_settings_still_gets_a_card(tmp_path):
    run, out = tmp_path / "my-run", tmp_path / "out"
    run.mkdir()
    out.mkdir()
    write_cards(run, out, 24, PROGRESS)
    made = ModelCard.load(out / "README.md")
    assert made.text.lstrip().startswith("# my-run")
    assert "settings could not be read" in made.text


def test_lone_surrogates_do_not_stop_an_export(tmp_path):
    metadata = ModelCard("---\nlicense: mit\n---\n").data
    assert render_card(metadata, "bad \udc80 text").endswith("bad ? text")


def test_completions_of_no_known_reward_or_of_another_version_leave_the_interval_alone():
    groups = [group("a", 1, 0, 0, 0), group("b", 1, 1, 1, 0)]
    groups[0].completions.append(completion(4, Unmeasured(RewardReason.TIMEOUT)))
    groups[1].completions.append(completion(4, Measured(1.0), version=23))
    evaluations = {each.prompt.id: evaluate_group(each, 24, parse_settings(TABLE)) for each in groups}
    score, _ = summarize(evaluations, {"a": ("e", 5), "b": ("e", 5)})
    assert mean_interval(score, 24, groups) == pytest.approx((0.01, 0.99))
    assert mean_interval(score, 24, groups[:1]) is None, "a group is missing, so nothing is known"
