"""Wrong settings: each message names the key, the problem and the remedy."""

import math
import tomllib
from typing import get_type_hints

import msgspec
import pytest

from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from envs.rewards.loading import CallOptions
from stream.errors import DataError, ReferenceNotFoundError, SettingsError
from workers.datasets.mix import open_dataset_mix
from workers.datasets.prompts import read_evaluation_prompts
from workers.evaluate.rescore import _load_functions
from workers.settings import sections
from workers.settings.toml_file import dump_settings, load_settings, parse_settings

LEAST = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"ref": "r.py:f"}]}
CODE = """
class World:
    def reset(self, **row): pass

def measure(completions, number): return [1.0] * len(completions)
"""


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        (
            "data",
            {"sets": [{"path": "a", "share": 1.0}]},
            ["data.sets[0].share", "path, rows, config, split, revision, weight, name"],
        ),
        ("data", {"sets": [{"path": "a", "weight": math.inf}]}, ["data.sets[0].weight", "finite"]),
        ("data", {"sets": [{"path": "a", "weight": -1.0}]}, ["data.sets[0].weight", ">= 0"]),
        ("rewards", {"ref": "a:b"}, ["rewards:", "[[rewards]]"]),
        ("engine", {"urls": "http://host:8000"}, ["engine.urls", '["..."]']),
        ("engine", {"urls": ["host:8000"]}, ["engine.urls: 'host:8000'", "http://HOST:PORT"]),
        ("engine", {"urls": ["http://[::1"]}, ["engine.urls: 'http://[::1'", "http://HOST:PORT"]),
        ("environments", {"a": "x:y", "b": {"ref": "x:y", "arg": {}}}, ["environments.b.arg", "ref, args"]),
        ("environments", {"a": "x:y", "b": {"args": {}}}, ["environments.b", "`ref`"]),
        ("rewards", [{"ref": "a:b", "weight": math.nan}], ["rewards[0].weight", "nan", "finite"]),
        ("rewards", [{"ref": "a:b", "weight": -math.inf}], ["rewards[0].weight", "-inf"]),
        ("rewards", [{"ref": "a:b"}, {"ref": "c:b"}], ["rewards[0]", "rewards[1]", "'b'", "name"]),
        ("rewards", [{"ref": "a:b", "name": "env"}], ["rewards[0].name", "'env'"]),
        ("rewards", [{"ref": "a:b", "granularity": "rows"}], ["rewards[0].granularity", "'rows'", "'row', 'group'"]),
        ("rollout", {"sampling": {"topp": 1.0}}, ["rollout.sampling.topp", "stop, top_p, top_k"]),
        ("rollout", {"sampling": {"logit_bias": {"-5": 1.0}}}, ["rollout.sampling.logit_bias", "-5"]),
        ("rollout", {"sampling": {"logit_bias": {"5": 101.0}}}, ["rollout.sampling.logit_bias", "100"]),
        ("rollout", {"sampling": {"logit_bias": {"5": math.nan}}}, ["rollout.sampling.logit_bias"]),
        ("rollout", {"sampling": {"logit_bias": {"a": 1.0}}}, ["rollout.sampling.logit_bias", "int"]),
        ("rollout", {"sampling": {"min_tokens": 600}}, ["min_tokens (600)", "max_tokens_per_turn (512)"]),
        ("rollout", {"sampling": {"top_p": 0.0}}, ["rollout.sampling.top_p", "> 0"]),
        ("rollout", {"sampling": {"stop": ["a", ""]}}, ["rollout.sampling.stop", "empty string"]),
        ("rollout", {"temperature": 0.001}, ["rollout.temperature", "0.01"]),
        ("eval", {"path": "e", "temperature": 0.001}, ["eval.temperature", "0.01"]),
        ("train", {"learning_rate": math.inf}, ["train.learning_rate", "finite"]),
        ("algorithm", {"success_threshold": math.nan}, ["algorithm.success_threshold", "finite"]),
        ("queue", {"lease_s": math.inf}, ["queue.lease_s", "<= 86400"]),
        ("run", {"name": "x\n"}, ["run.name"]),
        ("run", {"name": "my run"}, ["run.name: 'my run'", "write letters, digits, '.', '_' and '-'"]),
        ("run", {"name": "x", "metrics_address": "9100"}, ["run.metrics_address: '9100'", "write HOST:PORT"]),
        ("storage", {"url": "bucket/runs"}, ["storage.url: 'bucket/runs'", "such as s3://BUCKET/PREFIX"]),
        ("correction", {"preset": "TIS"}, ["correction.preset", "'TIS'", "decoupled_token_is"]),
        ("run", {"name": "x", "dashboard": "yes"}, ["run.dashboard", "'yes'", "'on', 'off' or an integer"]),
        ("run", {"name": "x", "seed": 2**63}, ["run.seed", "64 bits"]),
        ("environments", {"a": {"ref": "x:y", "args": {"n": [1, -(2**64)]}}}, ["environments.a.args.n[1]", "64 bits"]),
        ("run", {"name": "x", "address": "::1"}, ["address = '::1'", "brackets"]),
        ("run", {"name": "x", "address": "host:99999"}, ["address = 'host:99999'", "HOST:PORT"]),
        ("run", {"name": "x", "metrics_address": "[::1:80"}, ["metrics_address = '[::1:80'", "brackets"]),
        ("algorithm", {"truncation": {"lengths": "keep"}}, ["algorithm.truncation", "'lengths'", "'length'"]),
        ("algorithm", {"truncation": {"length": "kep"}}, ["algorithm.truncation", "'kep'", "'keep'"]),
        ("model", {"path": "m", "tool_format": "hermess"}, ["model.tool_format", "'hermess'", "'hermes'"]),
    ],
)
def test_a_wrong_value_is_refused_by_key_with_a_remedy(section, change, words):
    with pytest.raises(SettingsError) as caught:
        parse_settings(LEAST | {section: change}, "my.toml")
    for word in ["my.toml", *words]:
        assert word in str(caught.value)
    assert "regex" not in str(caught.value)


def test_every_pattern_of_a_setting_has_a_form_in_words():
    patterns = {
        f"{section}.{name}": meta.description
        for section, kinds in sections().items()
        for kind in kinds
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for meta in getattr(hint, "__metadata__", ())
        if isinstance(meta, msgspec.Meta) and meta.pattern
    }
    assert "run.name" in patterns
    assert all(patterns.values()), patterns


def test_a_logit_bias_is_read_and_written_back():
    table = {"top_p": 0.9, "stop": ["</answer>"], "logit_bias": {"5": -1.5}}
    settings = parse_settings(LEAST | {"rollout": {"sampling": table}})
    assert settings.rollout.sampling.logit_bias == {5: -1.5}
    assert parse_settings(tomllib.loads(dump_settings(settings))) == settings


def test_two_functions_with_the_same_name_may_be_renamed():
    parse_settings(LEAST | {"rewards": [{"ref": "a:b"}, {"ref": "c:b", "name": "other"}]})


def test_a_missing_prompt_file_is_reported_with_its_key(tmp_path):
    mix = parse_settings(LEAST | {"data": {"sets": [{"path": str(tmp_path / "gone.jsonl")}]}})
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file or folder; \[\[data\.sets\]\] path"):
        open_dataset_mix(mix)
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file or folder; eval\.path"):
        read_evaluation_prompts(parse_settings(LEAST | {"eval": {"path": str(tmp_path / "gone.jsonl")}}))
    with pytest.raises(DataError, match=r"d\.jsonl: no such file or folder; data\.path"):
        open_dataset_mix(parse_settings(LEAST))


def test_environments_and_rewards_in_each_others_table_are_recognised(tmp_path):
    (tmp_path / "mixed_up.py").write_text(CODE)
    file = tmp_path / "mixed_up.py"
    for ref in ("guess", f"{file}:World"):
        with pytest.raises(ReferenceNotFoundError, match=r"belongs? in \[environments\]"):
            RewardFunction.load(ref)
    for ref in ("code_jaccard", f"{file}:measure"):
        with pytest.raises(ReferenceNotFoundError, match=r"belongs? in \[\[rewards\]\]"):
            EnvironmentFactory.load(ref)


def test_rescoring_calls_a_function_with_the_options_of_its_settings(tmp_path):
    (tmp_path / "mixed_up.py").write_text(CODE)
    file = tmp_path / "again.toml"
    file.write_text(
        f'[[rewards]]\nref = "{tmp_path}/mixed_up.py:measure"\nprocesses = 2\ngranularity = "row"\ntimeout_s = 1.5\n'
    )
    (function,) = _load_functions(file, ())
    assert function.call_options == CallOptions(processes=2, granularity="row", timeout_s=1.5)


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 5000, "{a=" * 2000])
def test_a_value_that_no_parser_reads_is_an_error_with_the_name_of_the_file(value, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(f"[train]\nbatch_size = {value}\n")
    with pytest.raises(SettingsError, match=r"my\.toml: not TOML"):
        load_settings(file)
    file.write_text('[model]\npath = "m"\n')
    with pytest.raises(SettingsError, match=r"train\.batch_size: expected `int`, got `str`"):
        load_settings(file, (f"train.batch_size={value}",))


def test_a_folder_is_no_settings_file(tmp_path):
    with pytest.raises(SettingsError, match="Is a directory; name a settings file"):
        load_settings(tmp_path)


def test_dates_of_arguments_stay_dates_when_settings_are_stored():
    args = tomllib.loads("day = 2026-01-02\nat = 07:32:00\nmoment = 2026-01-02T03:04:05Z")
    settings = parse_settings(LEAST | {"environments": {"a": {"ref": "x:y", "args": args}}})
    stored = parse_settings(tomllib.loads(dump_settings(settings)))
    assert stored == settings
    assert stored.environments["a"].args == args
