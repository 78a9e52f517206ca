"""Names of runs, and what a start says before it does anything."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from stream.connection.run_identity import RunIdentity
from stream.durable import create_folder_atomically
from stream.errors import PenstockError, SettingsError
from workers.cli import penstock
from workers.launch.start import finished_summary, finished_text, prepare_start, start_lines
from workers.role.exit_codes import ExitCode
from workers.runs.find import find_run_folder, open_run
from workers.runs.folder import write_settings
from workers.runs.identity import flat_settings
from workers.runs.live_run import LiveRun, write_live
from workers.runs.summary import RunSummary, Staleness
from workers.settings.estimator_options import Grpo
from workers.settings.toml_file import dump_settings, load_settings, parse_settings
from workers.terminal.queues import _wait_for_run
from workers.vllm.launch_command import build_command

LEAST = """
[model]
path = "m"
[data]
path = "d.jsonl"
[[rewards]]
ref = "a.py:b"
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my math.toml").write_text(LEAST)
    return tmp_path / "my math.toml"


def begin(start) -> Path:
    start.settings.folder.mkdir(parents=True)
    write_settings(start.settings)
    return start.settings.folder


def test_a_file_without_a_name_starts_a_new_run_each_time_and_commands_find_the_newest(file, monkeypatch):
    monkeypatch.setattr("workers.launch.start.new_run_name", lambda _file: "my-math-20261122-101500")
    first = prepare_start(str(file), ())
    assert start_lines(first.settings, None, first.earlier) == [
        "new run my-math-20261122-101500 in runs/my-math-20261122-101500"
    ]
    begin(first)
    monkeypatch.undo()
    monkeypatch.chdir(file.parent)
    second = prepare_start(str(file), ())
    assert second.settings.run.name.startswith("my-math-2")
    assert "run.name=" + second.settings.run.name in second.overrides
    assert start_lines(second.settings, None, second.earlier)[1:] == [
        "`penstock run runs/my-math-20261122-101500` resumes the one before"
    ]
    folder = begin(second)
    assert find_run_folder(str(file)) == folder
    assert open_run(str(file)).name == second.settings.run.name


def test_a_run_is_named_after_its_folder_unless_it_has_a_name(file):
    assert load_settings(file, ("run.folder=/tmp/my runs/a+b",)).run.name == "a-b"
    assert load_settings(file, ("run.folder=/tmp/a", "run.name=b")).run.name == "b"
    settings = load_settings(file, ("run.folder=/tmp/a",))
    assert parse_settings(msgspec.toml.decode(dump_settings(settings))) == settings


def test_whoever_needs_a_folder_of_a_run_without_a_name_learns_what_to_set(file):
    with pytest.raises(SettingsError, match=r"run\.name is empty"):
        _ = load_settings(file).folder
    with pytest.raises(PenstockError, match="no run was started from"):
        open_run(str(file), must_have_begun=True)


@pytest.mark.parametrize("target", ["runs/a", "a", "runs/a/run.toml", "my math.toml"])
def test_a_run_is_resumed_by_folder_name_or_file(file, target):
    file.write_text("[run]\nname = 'a'\n" + LEAST)
    begin(prepare_start(str(file), ()))
    start = prepare_start(target, ("train.learning_rate=3e-5", "train.max_steps=20"))
    assert (start.settings.run.name, start.earlier) == ("a", None)
    identity = RunIdentity(id="a", settings=flat_settings(load_settings(file)))
    [line] = start_lines(start.settings, identity)
    assert line.startswith("resuming run a at step 0 of 20; ")
    assert "train.learning_rate from 1e-6 to 0.00003" in line
    assert find_run_folder(target) == Path("runs/a")


def test_a_run_of_a_version_with_more_keys_is_resumed_by_its_own_file(file):
    file.write_text("[run]\nname = 'a'\n" + LEAST)
    stored = begin(prepare_start(str(file), ())) / "run.toml"
    stored.write_text(stored.read_text().replace("[filter]\n", "[filter]\nmin_mean_reward = 0.0\n"))
    old = r"runs/a/run\.toml: unknown key filter\.min_mean_reward; allowed there: .+"
    with pytest.raises(SettingsError, match=f"^{old}$"):
        prepare_start("a", ())
    identity = RunIdentity(id="a", settings={"algorithm.reward_scale": "1.0"})
    assert start_lines(prepare_start(str(file), ()).settings, identity) == ["resuming run a at step 0"]


def test_a_finished_run_says_so_until_something_changes(file):
    settings = load_settings(file, ("run.name=a",))
    assert finished_summary(settings) is None
    folder = begin(prepare_start(str(file), ("run.name=a",)))
    summary = RunSummary(
        steps=4, groups_trained=1, groups_dropped={}, completion_states={}, staleness=Staleness(),
        tokens_per_second=1.0, seconds=1.0, fed=1, outstanding=0, dead=0, duplicates=0,
    )  # fmt: skip
    (folder / "summary.json").write_bytes(msgspec.json.encode(summary))
    assert finished_summary(settings) is None
    summary.finished, summary.why_untrained = True, "nothing was trained"
    (folder / "summary.json").write_bytes(msgspec.json.encode(summary))
    assert finished_summary(settings) == summary
    text = finished_text(settings, summary)
    assert text.startswith("run a has finished: 4 steps, 1 group trained. `penstock export runs/a OUT`")
    assert text.endswith(". nothing was trained")
    assert finished_summary(load_settings(file, ("run.name=a", "train.max_steps=8"))) is None


def test_no_such_run_is_an_error_by_name(file):
    for find in (lambda: prepare_start("nothing", ()), lambda: find_run_folder("nothing")):
        with pytest.raises(PenstockError, match="nothing is neither"):
            find()


def test_a_settings_file_that_does_not_exist_is_named_with_the_folder_where_it_was_looked_for(file):
    for find in (lambda: open_run("nope.toml"), lambda: find_run_folder("nope.toml")):
        with pytest.raises(PenstockError, match=rf"^nope\.toml: no such file; .* {file.parent}$"):
            find()


@pytest.mark.parametrize("target", ["nope.toml", "nothing", "", "counter.py"])
def test_a_start_of_what_is_no_settings_file_ends_with_the_code_of_wrong_settings(file, target):
    (file.parent / "counter.py").touch()
    result = CliRunner().invoke(penstock, ["run", target])
    assert result.exit_code == ExitCode.USAGE
    assert (target or "''") in result.output


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("counter.py", "penstock check counter.py:NAME"),
        ("counter.py:Counter", "penstock check counter.py:Counter"),
        ("prompts.jsonl", r'\[data\] path = "prompts.jsonl"'),
        ("policy", r'\[model\] path = "policy"'),
    ],
)
def test_what_a_settings_file_names_is_not_started_itself(file, target, remedy):
    folder = file.parent / "policy"
    folder.mkdir()
    for each in (folder / "config.json", file.parent / "counter.py", file.parent / "prompts.jsonl"):
        each.touch()
    with pytest.raises(PenstockError, match=f"neither a settings file.*{remedy}"):
        prepare_start(target, ())


def test_a_run_is_named_on_the_server_of_the_environment(file, monkeypatch):
    monkeypatch.setenv("PENSTOCK_REDIS", "redis://server")
    run = open_run("far-away", must_have_begun=True)
    assert (run.name, run.url, run.folder) == ("far-away", "redis://server", None)
    with pytest.raises(PenstockError, match="far-away is neither"):  # its files are asked for
        open_run("far-away")
    (file.parent / "by-hand").mkdir()
    (file.parent / "by-hand/identity.json").touch()
    with pytest.raises(PenstockError, match=r"by-hand has no run.toml.*give their settings file"):
        open_run("by-hand", must_have_begun=True)


def test_options_of_the_default_loss_and_estimator_need_no_name(file):
    settings = load_settings(file, ("loss.clip_high=.3", "estimator.normalize_std=false"))
    assert (settings.loss.clip_high, settings.estimator) == (0.3, Grpo(normalize_std=False))


def test_watching_waits_for_a_run_that_is_about_to_start(file, monkeypatch, capsys):
    """The wait itself starts the run."""

    def start(_seconds):
        folder = begin(prepare_start(str(file), ("run.name=soon",)))
        write_live(folder, LiveRun.of_this_process("soon", "unix:///nowhere.sock", []))

    monkeypatch.setattr("workers.terminal.queues.time.sleep", start)
    assert _wait_for_run("soon", "").url == "unix:///nowhere.sock"
    assert "waiting for it to start" in capsys.readouterr().err
    monkeypatch.setattr("workers.terminal.queues._START_TIMEOUT_S", -1.0)
    with pytest.raises(PenstockError, match="later is neither"):
        _wait_for_run("later", "")


def test_saved_files_have_the_permissions_of_their_folder(tmp_path):
    with create_folder_atomically(tmp_path / "model") as folder:
        (folder / "weights").write_bytes(b"")
        (folder / "weights").chmod(0o600)
        (folder / "config.json").write_text("{}")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert modes["weights"] == modes["config.json"] == (tmp_path / "model").stat().st_mode & 0o666


@pytest.mark.parametrize(
    ("config", "asked", "length"),
    [
        ({"max_position_embeddings": 512}, "0", "512"),
        ({"max_position_embeddings": 99_999}, "0", "1224"),
        ({"text_config": {"max_position_embeddings": 600}}, "0", "600"),
        ({}, "0", "1224"),
        ({"max_position_embeddings": 512}, "700", "700"),  # vLLM refuses it, with a message of its own
    ],
)
def test_an_engine_is_as_long_as_needed_and_as_the_model_was_made_for(file, config, asked, length):
    (file.parent / "m").mkdir()
    (file.parent / "m" / "config.json").write_bytes(msgspec.json.encode(config))
    limits = ("rollout.max_tokens=200", "rollout.max_tokens_per_turn=50", f"engine.max_model_len={asked}")
    command = build_command(load_settings(file, limits), Path("python"), "localhost", 8000, is_cpu_build=True)
    assert command[command.index("--max-model-len") + 1] == length
