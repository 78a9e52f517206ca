"""The settings file: types, unknown keys, overrides, the generated page."""

import importlib.util
import re
import time
import tomllib
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from stream.errors import SettingsError
from stream.validity import TruncationReason
from workers import settings
from workers.settings import EngineSettings, setting_keys
from workers.settings.toml_file import dump_settings, load_settings, parse_settings, settings_for_model

LEAST = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"ref": "r.py:f"}]}
DOCS = Path(__file__).parents[2] / "docs"


def page_module():
    spec = importlib.util.spec_from_file_location("settings_page", DOCS / "settings_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_minimal_settings_file_has_defaults_for_everything_else():
    result = parse_settings(LEAST)
    assert (result.run.name, result.max_model_len) == ("", 4096 + 1024)
    assert result.capacity == 2 * result.train.batch_size
    assert result.min_valid_rows == 4  # half of a group of 8


def test_the_capacity_counts_all_steps_between_two_publications():
    result = parse_settings(LEAST | {"train": {"batch_size": 4, "publish_every": 3}, "pacing": {"max_staleness": 2}})
    assert result.groups_per_version == 12
    assert result.capacity == 36


def test_limits_that_follow_another_key():
    limits = [parse_settings(LEAST | {"rollout": {"max_tool_calls": n}}).rollout.max_tool_errors for n in (32, 5, 1)]
    assert limits == [16, 2, 1]
    assert parse_settings(LEAST | {"abort": {"stall_timeout_s": 60.0}}).abort.trainer_wait_s == 30.0
    keeps = [parse_settings(LEAST | {"archive": {"keep": keep}}).archive for keep in (8, "all")]
    assert [(each.max_group_bytes, each.max_trained_token_bytes) for each in keeps] == [
        (8_000_000, 2_000_000),
        (None, None),
    ]


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        parse_settings(LEAST).run.name = "other"


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("train", {"lr": 1}, ["train.lr", "learning_rate"]),
        ("rewards", [{"reff": "x"}], ["rewards[0].reff", "ref, name, args, weight, run_in"]),
        ("nonsense", {}, ["nonsense", "run, model, data"]),
        ("rollout", {"group_size": "8"}, ["rollout.group_size", "int"]),
        ("rollout", {"group_size": 0}, ["rollout.group_size", ">= 1"]),
        ("train", {"learning_rate": -1.0}, ["train.learning_rate", ">= 0"]),
        ("estimator", {"name": "ppo"}, ["estimator.name", "ppo", "grpo, dr_grpo"]),
        ("run", {"name": "../up"}, ["run.name"]),
        ("rewards", [], ["[environments]", "[[rewards]]"]),
        ("rollout", {"max_tokens": 10, "sampling": {"min_tokens": 11}}, ["min_tokens (11)", "max_tokens (10)"]),
        ("rollout", {"temperature": 0.0}, ["rollout.temperature", "train.learning_rate"]),
        ("rollout", {"group_size": 1}, ["filter.min_valid_rows", "rollout.group_size"]),
        ("algorithm", {"truncation": {"length": "penalty"}}, ["algorithm.truncation", "algorithm.overlong_penalty"]),
        ("algorithm", {"truncation": {"boredom": "keep"}}, ["algorithm.truncation", "boredom"]),
    ],
)
def test_an_invalid_value_is_refused_by_key(section, change, words):
    with pytest.raises(SettingsError) as caught:
        parse_settings(LEAST | {section: change}, "my.toml")
    for word in ["my.toml", *words]:
        assert word in str(caught.value)


def test_a_short_completion_needs_no_limit_per_turn():
    rollout = parse_settings(LEAST | {"rollout": {"max_tokens": 64}}, "my.toml").rollout
    assert (rollout.max_tokens, rollout.max_tokens_per_turn) == (64, 512)


def test_a_missing_file_and_invalid_toml_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="no such file"):
        load_settings(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("[run\n")
    with pytest.raises(SettingsError, match="not TOML"):
        load_settings(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("[model]\npath = models/mine\n")
    with pytest.raises(SettingsError, match=r"line 2.*text is written in quotes"):
        load_settings(tmp_path / "run.toml")


def test_settings_come_from_a_url_and_no_message_shows_its_key(tmp_path):
    answers = {"/run.toml": b'[model]\npath = "m"\n[environments]\nc = "calculator"\n', "/bad.toml": b"[run\n"}
    answers["/latin.toml"] = b'[model]\npath = "mod\xe8le"\n'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = answers.get(self.path.partition("?")[0])
            self.send_response(200 if content else 404)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        base = f"http://127.0.0.1:{server.server_port}"
        assert load_settings(f"{base}/run.toml?key=secret", ("run.name=other",)).run.name == "other"
        problems = {
            "bad.toml": "not TOML",
            "none.toml": "could not be downloaded: HTTP Error 404",
            "latin.toml": "utf-8",
        }
        for path, words in problems.items():
            with pytest.raises(SettingsError, match=rf"^{base}/{path}: .*{words}") as caught:
                load_settings(f"{base}/{path}?key=secret")
            assert "secret" not in str(caught.value)
        server.shutdown()
        thread.join()
    with pytest.raises(SettingsError, match=r"refused\S*; check the URL"):
        load_settings(f"{base}/run.toml")


def test_settings_from_a_url_are_whole_and_arrive_in_time(monkeypatch):
    monkeypatch.setattr("workers.settings.toml_file._TIMEOUT_S", 0.3)
    content = b'\xef\xbb\xbf[model]\npath = "m"\n[environments]\nc = "calculator"\n'
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["Authorization"])
            self.send_response(200)
            self.send_header("Content-Length", str(1000 if self.path in {"/cut", "/slow"} else len(content)))
            self.end_headers()
            if self.path == "/slow":
                with suppress(ConnectionError):
                    while True:
                        self.wfile.write(b"#")
                        time.sleep(0.02)
            self.wfile.write(content if self.path != "/page" else b"<html>Log in".ljust(len(content)))

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        host = f"127.0.0.1:{server.server_port}"
        assert load_settings(f"http://me:p%40ss@{host}/run.toml").model.path == "m"  # in spite of the byte order mark
        assert asked == ["Basic bWU6cEBzcw=="]
        for path, words in {"cut": "946 more expected", "slow": "not complete after", "page": "a web page"}.items():
            with pytest.raises(SettingsError, match=words):
                load_settings(f"http://{host}/{path}")
        server.shutdown()
        thread.join()
    with pytest.raises(SettingsError, match="escape") as caught:
        load_settings("http://me:secret/word@host/run.toml")
    assert "secret" not in str(caught.value)


def test_overrides_reach_any_key_and_are_checked(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(dump_settings(parse_settings(LEAST)))
    result = load_settings(file, ("train.learning_rate=0.5", "run.name=other", 'engine.urls=["http://a"]'))
    assert (result.train.learning_rate, result.run.name, result.engine.urls) == (0.5, "other", ("http://a",))
    nested = load_settings(file, ("rollout.sampling.top_p=0.5", "algorithm.truncation.length=exclude"))
    assert nested.rollout.sampling.top_p == 0.5
    assert nested.truncation_policy(TruncationReason.LENGTH) == "exclude"
    for wrong in ("train.learning_rate", "train.pace=1", "run.name.first=x"):
        with pytest.raises(SettingsError):
            load_settings(file, (wrong,))


def test_dumped_settings_are_read_back_equal():
    full = parse_settings(
        LEAST
        | {
            "environments": {"a": "calculator", "b": "x.py:Y"},
            "rewards": [{"ref": "a:b", "weight": 0.5}, {"ref": "c:d", "run_in": "rollout"}],
            "algorithm": {"truncation": {"length": "exclude"}},
            "data": {"path": "d", "columns": {"answer": "gold"}, "chat_template_kwargs": {"enable_thinking": False}},
        }
    )
    assert parse_settings(tomllib.loads(dump_settings(full))) == full


def test_only_the_wall_clock_excludes_completions_by_default():
    result = parse_settings(LEAST)
    policies = {reason: result.truncation_policy(reason) for reason in TruncationReason}
    assert {reason for reason, policy in policies.items() if policy != "keep"} == {TruncationReason.WALL_CLOCK}


@pytest.mark.parametrize(
    ("sampling", "keys"),
    [
        ({"stop": ["</answer>"]}, []),
        ({"top_p": 0.9, "logit_bias": {"5": 1.0}}, ["top_p", "logit_bias"]),
        ({"top_k": 5, "min_p": 0.1, "min_tokens": 2}, ["top_k", "min_p", "min_tokens"]),
    ],
)
def test_settings_know_which_keys_change_the_sampled_distribution(sampling, keys):
    assert parse_settings(LEAST | {"rollout": {"sampling": sampling}}).truncated_sampling == keys


def test_there_are_at_most_150_keys():
    assert len(setting_keys()) <= 150


def test_every_key_has_a_docstring_and_the_page_is_up_to_date():
    module = page_module()
    texts = module.docstrings()
    for kinds in [*settings.sections().values(), [settings.SamplingSettings, settings.DatasetSettings]]:
        for kind in kinds:
            assert texts[kind.__name__][""]
            for field in msgspec.structs.fields(kind):
                assert texts[kind.__name__].get(field.name), f"{kind.__name__}.{field.name} has no docstring"
    page = module.page()
    assert page == (DOCS / "settings.md").read_text(), "run: python docs/settings_page.py > docs/settings.md"
    assert not re.findall(r"Annotated|Literal|Meta\(|tuple\[|dict\[", page)  # types are words


def test_a_model_folder_is_served_with_defaults_and_overrides(tmp_path):
    made = settings_for_model(tmp_path, ("engine.max_model_len=64", "model.dtype=bfloat16"))
    assert (made.model.path, made.model.dtype) == (str(tmp_path), "bfloat16")
    assert (made.engine.max_model_len, made.engine.max_batch_size) == (64, EngineSettings().max_batch_size)
    with pytest.raises(SettingsError, match=r"unknown key engine\.max_len"):
        settings_for_model(tmp_path, ("engine.max_len=64",))
