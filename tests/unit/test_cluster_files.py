"""The files for Slurm, SkyPilot and Ray: their commands and settings exist, and their logic places the roles."""

import ast
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import msgspec
import pytest
import yaml

from tests.unit.test_docs_code import check_penstock, commands
from workers.runs.live_run import LiveRun
from workers.settings import Settings
from workers.settings.toml_file import parse_settings

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "examples" / "slurm" / "penstock.sbatch"
TASK = ROOT / "examples" / "skypilot" / "penstock.yaml"
RAY = ROOT / "examples" / "ray" / "penstock_on_ray.py"
SKYPILOT = yaml.safe_load(TASK.read_text())
SHELL = {"sbatch": SBATCH.read_text(), "run": SKYPILOT["run"], "setup": SKYPILOT["setup"]}
SETTINGS: Settings = parse_settings(
    {"model": {"path": "m"}, "data": {"path": "p"}, "rewards": [{"ref": "r.py:f"}]}, "least settings"
)


def bash(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", text], env=variables, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def tools(tmp_path):
    """Return a PATH with a `penstock` that writes its arguments, and ends with 0 or with $CODE."""
    folder = tmp_path / "bin"
    folder.mkdir()
    files = {
        "penstock": 'echo "$*" >> calls; [ "$1" != serve ] || exec sleep 30; sleep 0.2; [ "$1" != "$FAILS" ] || exit 2',
        "redis-server": '[ "$1" = redis-data/redis.conf ] && exec sleep 30; exit 0',
        "python": "echo redis-server",
    }
    for name, text in files.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.mark.parametrize("name", SHELL)
def test_bash_accepts_the_text(name):
    assert subprocess.run(["bash", "-n"], input=SHELL[name], text=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["sbatch", "run"])
def test_commands_options_and_settings_exist(name):
    lines = [line for line in SHELL[name].splitlines() if re.search(r"\bpenstock [a-z]+ \"\$", line)]
    assert len(lines) >= 5
    for line in lines:
        call = re.search(r"penstock [^|)&;]*", re.sub(r"\$\(\((.*?)\)\)", "8000", line))[0].strip()
        (words,) = commands(re.sub(r'"\$\{options\[@\]\}"', "", call))
        check_penstock(words[1:])
    for key in re.findall(r"--set \"([a-z_.]+)=", SHELL[name]):
        section, field = key.split(".")
        assert hasattr(getattr(SETTINGS, section), field), key


def test_the_job_reads_settings_with_the_defaults_of_the_code(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[run]\nname = "my-run"\n')
    read = f"source {SBATCH}; read_settings {file}"
    found = dict(
        line.split("=", 1)
        for line in bash(read, PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin").stdout.splitlines()
    )
    s = SETTINGS
    assert found == {
        "run": "my-run",
        "folder": "runs/my-run",
        "ranks": str(s.train.ranks),
        "engines": str(s.engine.count),
        "devices": "''",
        "rollouts": str(s.rollout.workers),
        "scorers": str(s.score.workers),
    }
    file.write_text("[run]\n")
    assert "run.name is empty" in bash(read, PATH="/usr/bin:/bin").stderr


@pytest.mark.parametrize(
    ("nodes", "train_nodes", "expected"),
    [
        ("a", 1, "a | a | --engine http://a:8000 --engine http://a:8001"),
        ("a b c", 1, "a | b c | " + " ".join(f"--engine http://{n}:800{i}" for n in "bc" for i in (0, 1))),
        ("a b c", 2, "a b | c | --engine http://c:8000 --engine http://c:8001"),
        ("a b", 2, "a b | a b | " + " ".join(f"--engine http://{n}:800{i}" for n in "ab" for i in (0, 1))),
        ("a b c", 3, "error: train.ranks is 4, which 3 nodes cannot share equally"),
    ],
)
def test_nodes_are_divided_into_trainers_and_samplers(nodes, train_nodes, expected):
    show = 'echo "${trainers[*]} | ${samplers[*]} | $engine_options"'
    text = f"source {SBATCH}; engines=2 ranks=4; place {nodes}; {show}"
    result = bash(text, PATH="/usr/bin:/bin", TRAIN_NODES=str(train_nodes))
    assert (result.stdout + result.stderr).strip() == expected


@pytest.mark.parametrize("name", ["sbatch", "run"])
@pytest.mark.parametrize(("codes", "calls", "result"), [("1 3 0", 3, 0), ("1 2", 2, 2), ("4", 1, 4), ("1", 8, 1)])
def test_a_role_is_started_again_until_it_is_done_or_would_fail_again(name, codes, calls, result, tmp_path):
    function = re.search(r"^keep_running\(\) \{.*?^\}", SHELL[name], re.DOTALL | re.MULTILINE)[0]
    role = f'codes=({codes}); role() {{ echo call >> calls; return "${{codes[$(wc -l < calls) - 1]:-1}}"; }}'
    stubs = 'sleep() { :; }; setpriv() { shift 2; "$@"; }; here=h'
    text = f"cd {tmp_path}; set -euo pipefail; {function}\n{role}; {stubs}; keep_running role"
    done = bash(text, PATH="/usr/bin:/bin")
    assert (tmp_path / "calls").read_text().count("call") == calls
    assert done.returncode == result


def test_operators_find_the_jobs_server_and_only_they_can_read_its_password(tmp_path, tools):
    text = f"source {SBATCH}; folder=run run=my-run password=secret; pids=(); serve_redis; wait"
    show = "cat run/live.json; stat -c %a run/live.json run/redis/redis.conf"
    url = "redis://:secret@n1:6390"
    result = subprocess.run(
        ["bash", "-euc", f"{text}; {show}"],
        env={"PATH": tools, "PENSTOCK_REDIS": url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    live, *modes = result.stdout.split("\n")[:3]
    assert msgspec.json.decode(live, type=LiveRun).redis == url, result.stderr
    assert modes == ["600", "600"]
    assert "requirepass secret\n" in (tmp_path / "run/redis/redis.conf").read_text()


def run_on_machine(rank, tmp_path, tools, fails=""):
    """Run the task's block `run` as one of three machines, with stand-ins for the programs; return it and the calls."""
    variables = {
        "PATH": tools,
        "HOME": str(tmp_path),
        "SETTINGS": "run.toml",
        "REDIS_PASSWORD": "secret",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
        "FAILS": fails,
    }
    result = subprocess.run(
        ["bash", "-c", SHELL["run"]],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return result, sorted((tmp_path / "calls").read_text().splitlines())


ENGINES = "--engine http://10.0.0.2:8000 --engine http://10.0.0.3:8000"


def test_machine_0_trains_and_the_others_sample(tmp_path, tools):
    result, calls = run_on_machine(0, tmp_path, tools)
    assert result.returncode == 0, result.stderr
    assert calls == [f'{role} run.toml --set run.address="10.0.0.1" {ENGINES}' for role in ("feed", "train")]
    assert "bind 10.0.0.1\n" in (tmp_path / "redis-data/redis.conf").read_text()
    (tmp_path / "calls").unlink()
    result, calls = run_on_machine(2, tmp_path, tools)
    assert result.returncode == 0, result.stderr
    assert calls == [
        f'rollout run.toml --set run.address="10.0.0.3" {ENGINES}',
        f'score run.toml --set run.address="10.0.0.3" {ENGINES}',
        "serve run.toml --host 10.0.0.3 --port 8000",
    ]


def test_a_role_that_would_fail_again_ends_its_machines_task(tmp_path, tools):
    result, _ = run_on_machine(1, tmp_path, tools, fails="score")
    assert result.returncode == 1


def test_the_tasks_keys_are_skypilots():
    assert set(SKYPILOT) == {"name", "num_nodes", "workdir", "resources", "envs", "secrets", "setup", "run"}
    assert SKYPILOT["secrets"] == {"REDIS_PASSWORD": None}


@pytest.fixture
def on_ray(monkeypatch):
    """Return the names of the script for Ray, with a stand-in for Ray itself."""
    ray, util = types.ModuleType("ray"), types.ModuleType("ray.util")
    ray.remote = lambda **_: lambda function: function
    ray.util, util.get_node_ip_address = util, lambda: "10.0.0.1"
    ray.get = lambda urls, timeout: urls
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", util)
    return types.SimpleNamespace(**runpy.run_path(str(RAY)))


def test_every_sampler_on_ray_has_rollout_workers_and_scorers(on_ray):
    tasks = on_ray.plan({"train": {"ranks": 4}, "rollout": {"workers": 3}}, samplers=2, gpus=1)
    assert [role for role, _ in tasks] == ["train", "feed", *["rollout", "rollout", "rollout", "score"] * 2]
    assert [how.get("num_gpus", 0) for _, how in tasks[:3]] == [4, 0, 0]
    assert on_ray.plan({}, samplers=1, gpus=0)[0] == ("train", {"num_gpus": 0})


def test_a_role_on_ray_is_done_or_raises_to_be_started_again(on_ray, tmp_path, tools, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", tools)
    (tmp_path / "bin" / "penstock").write_text(
        '#!/bin/sh\necho "$*" >> calls; cat "${6#file:}" >> urls; [ "$1" != "$FAILS" ] || exit 2\n'
    )
    get_url = types.SimpleNamespace(remote=lambda: "http://h:1")
    assert on_ray.run_role("feed", "run.toml", "redis://h", [types.SimpleNamespace(get_url=get_url)] * 2) == 0
    assert (tmp_path / "urls").read_text() == "http://h:1\nhttp://h:1"
    monkeypatch.setenv("FAILS", "score")
    assert on_ray.run_role("score", "run.toml", "redis://h", []) == 2
    (tmp_path / "bin" / "penstock").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(on_ray.RoleEndedError, match="penstock train ended with code 1"):
        on_ray.run_role("train", "run.toml", "redis://h", [])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert re.fullmatch(r'feed run\.toml --set run\.address="10\.0\.0\.1" --engine file:/\S+/engines\.txt', calls[0])
    for call in calls:
        check_penstock(call.split())


def test_an_engine_on_ray_ends_with_its_server(on_ray, tmp_path, tools, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", tools)
    (tmp_path / "bin" / "penstock").write_text('#!/bin/sh\necho "$*" >> calls; echo; echo listening on http://h:1\n')
    engine = on_ray.Engine("run.toml")
    assert engine.get_url() == "http://h:1"
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        engine.run()
    with engine.server:
        pass  # it has ended
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["serve run.toml --host 10.0.0.1 --port 0"]
    for call in calls:
        check_penstock(call.split())


def test_exit_codes_are_those_of_the_product():
    from workers.role.exit_codes import ExitCode

    codes = {ExitCode.SUCCESS, ExitCode.USAGE, ExitCode.PERMANENT}
    (node,) = [
        each
        for each in ast.parse(RAY.read_text()).body
        if isinstance(each, ast.Assign) and each.targets[0].id == "DONE_OR_PERMANENT"
    ]
    assert set(ast.literal_eval(node.value)) == codes
    assert "case $code in 0 | 2 | 4)" in SHELL["sbatch"]
    assert "case $code in 0 | 2 | 4)" in SHELL["run"]
