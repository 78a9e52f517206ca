"""Tasks of Harbor's format are read field by field, and refused by name, with the line."""

from pathlib import Path

import pytest

from envs.harbor.config import TaskError
from envs.harbor.task import selected_files
from envs.harbor.task_reader import read_task, read_tasks, task_folders
from envs.sandboxes.contract import Network
from stream.errors import DataError
from tests.cases.harbor_tasks import TEST, write_files, write_steps, write_task


def refusal(folder: Path) -> TaskError:
    with pytest.raises(TaskError) as raised:
        read_task(folder)
    return raised.value


def test_a_task_of_one_instruction_is_one_step(tmp_path):
    settings = """
[agent]
timeout_sec = 90.0
user = 1000
[verifier]
timeout_sec = 30
env = { LEVEL = "2" }
[environment]
docker_image = "busybox"
cpus = 2
memory_mb = 512
storage_mb = 1024
workdir = "/work"
env = { NAME = "value" }
[environment.healthcheck]
command = "test -f /ready"
retries = 5
"""
    task = read_task(write_task(tmp_path / "count", settings))
    (step,) = task.steps
    assert (task.name, task.environment.image, task.environment.workdir) == ("count", "busybox", "/work")
    assert (task.environment.cpus, task.environment.memory_mb, task.environment.disk_mb) == (2.0, 512, 1024)
    assert (task.environment.env, task.environment.healthcheck.retries) == ({"NAME": "value"}, 5)
    assert (step.instruction, step.timeout_s, step.user) == ("Make the file /work/done.\n", 90.0, "1000")
    assert (step.verifier.timeout_s, step.verifier.env, step.verifier.separate) == (30.0, {"LEVEL": "2"}, None)
    assert step.solution == tmp_path / "count" / "solution"


@pytest.mark.parametrize("version", ['version = "1.0"', 'schema_version = "1.3"', ""])
def test_every_schema_of_version_1_is_read(tmp_path, version):
    toml = f'{version}\n[environment]\ndocker_image = "busybox"\n'
    assert read_task(write_task(tmp_path, task__toml="", **{"task.toml": toml})).environment.image == "busybox"


@pytest.mark.parametrize(
    ("settings", "name", "line"),
    [
        ('[environment]\nos = "windows"', "environment.os", 3),
        ("[environment]\ngpus = 1", "environment.gpus", 3),
        ('[environment]\nskills_dir = "/skills"', "environment.skills_dir", 3),
        ('[environment.tpu]\ntype = "v6e"', "environment.tpu", 2),
        ('[[environment.mcp_servers]]\nname = "a"', "environment.mcp_servers", 2),
        ('[environment]\ncpus = "two"', "environment.cpus", 3),
        ('[environment]\ndocker_image = "b"\nmemory = "2 apples"', "environment.memory", 4),
        ('[environment]\ndocker_image = "b"\nmemory = "2G"\nmemory_mb = 1024', "environment.memory", 4),
        ("[agent]\ntimeout_sec = 5\n[verifier]\ntimeout_sec = -1", "verifier.timeout_sec", 5),
        ('artifacts = ["/logs/verifier"]', "artifacts.source", 2),
        ('artifacts = ["/tests/out"]', "artifacts.source", 2),
        ('artifacts = ["/"]', "artifacts.source", 2),
        ('artifacts = ["relative"]', "artifacts.source", 2),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]', "verifier.environment", 4),
        ('[[verifier.collect]]\ncommand = "x"\nservice = "db"', "verifier.collect.service", 4),
        ('[agent]\nallowed_hosts = ["pypi.org"]', "agent.allowed_hosts", 3),
    ],
)
def test_what_is_not_done_is_refused_by_name_with_its_line(tmp_path, settings, name, line):
    error = refusal(write_task(tmp_path, settings))
    assert error.name == name
    assert f"task.toml:{line}: " in str(error)


def test_a_newer_major_version_is_refused(tmp_path):
    error = refusal(write_task(tmp_path, **{"task.toml": 'schema_version = "2.0"\n'}))
    assert (error.name, "task.toml:1: " in str(error)) == ("schema_version", True)


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("environment/docker-compose.yaml", "services: {}", "docker-compose.yaml"),
        ("trajectory.json", "{}", "trajectory.json"),
    ],
)
def test_a_file_that_is_not_supported_is_refused_by_its_name(tmp_path, name, text, refused):
    error = refusal(write_files(write_task(tmp_path), {name: text}))
    assert (error.name, name in str(error)) == (refused, True)


def test_unknown_keys_are_listed_and_not_read(tmp_path):
    task = read_task(write_task(tmp_path, 'speed = 3\n[agent]\nmood = "good"\n[metadata]\nanything = 1'))
    assert task.unknown_keys == ("speed", "agent.mood")
    assert task.columns["metadata"] == {"anything": 1}


def test_a_missing_test_is_refused(tmp_path):
    write_task(tmp_path)
    (tmp_path / "tests" / "test.sh").unlink()
    assert refusal(tmp_path).name == "test.sh"


def test_a_missing_image_is_refused_and_a_dockerfile_is_one(tmp_path):
    write_task(tmp_path, image="")
    assert refusal(tmp_path).name == "environment.docker_image"
    write_files(tmp_path, {"environment/Dockerfile": "FROM busybox\n"})
    task = read_task(tmp_path)
    assert (task.environment.image, task.environment.context) == ("", tmp_path / "environment")


def test_older_keys_mean_the_newer_ones(tmp_path):
    settings = '[environment]\ndocker_image="b"\nmemory = "2G"\nstorage = "512M"\nallow_internet = false'
    task = read_task(write_task(tmp_path, settings))
    assert (task.environment.memory_mb, task.environment.disk_mb) == (2048, 512)
    assert not task.is_cut(Network.OFF)


@pytest.mark.parametrize(
    ("settings", "agent", "verifier"),
    [
        ("", Network.OPEN, Network.OPEN),
        ('[agent]\nnetwork_mode = "no-network"', Network.OFF, Network.OPEN),
        ('[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["PyPI.org."]', Network.OPEN, Network.ALLOWLIST),
        ('[environment]\ndocker_image="b"\nnetwork_mode = "no-network"', Network.OFF, Network.OFF),
    ],
)
def test_each_phase_has_its_own_network_or_its_environments(tmp_path, settings, agent, verifier):
    (step,) = read_task(write_task(tmp_path, settings)).steps
    assert (step.reach.network, step.verifier.reach.network) == (agent, verifier)
    assert read_task(tmp_path).is_cut(Network.OFF) == ((agent, verifier) != (Network.OFF, Network.OFF))
    assert not read_task(tmp_path).is_cut(Network.OPEN)
    assert step.verifier.reach.hosts == (("pypi.org",) if verifier is Network.ALLOWLIST else ())


@pytest.mark.parametrize(
    ("settings", "image", "has_tests"),
    [
        ("", None, False),
        ('[verifier]\nenvironment_mode = "separate"', "busybox", False),
        ('[verifier.environment]\ndocker_image = "judge"', "judge", True),
        ("[verifier.environment]\ncpus = 3", "busybox", False),
    ],
)
def test_the_mode_of_the_verifier_is_resolved_as_harbor_does(tmp_path, settings, image, has_tests):
    (step,) = read_task(write_task(tmp_path, settings)).steps
    assert (step.verifier.separate and step.verifier.separate.image) == image
    assert step.verifier.has_tests is has_tests
    assert [artifact.source for artifact in step.verifier.artifacts] == ["/logs/artifacts"]


def test_a_dockerfile_beside_the_tests_is_the_verifiers_image(tmp_path):
    task = write_task(tmp_path, '[verifier]\nenvironment_mode = "separate"', tests__Dockerfile="FROM judge\n")
    (step,) = read_task(task).steps
    assert (step.verifier.separate.context, step.verifier.has_tests) == (tmp_path / "tests", True)


STEPS = """
multi_step_reward_strategy = "final"
[agent]
timeout_sec = 60
user = "agent"
[environment]
docker_image = "busybox"
[[steps]]
name = "first"
min_reward = 0.5
[[steps]]
name = "second"
min_reward = { style = 1 }
[steps.agent]
user = "root"
timeout_sec = 5
[steps.healthcheck]
command = "true"
"""


def test_steps_take_from_the_task_what_they_do_not_say(tmp_path):
    task = read_task(write_steps(tmp_path, STEPS, ("first", "second")))
    first, second = task.steps
    assert task.is_final
    assert (first.name, first.instruction, first.user, first.timeout_s) == ("first", "Do first.\n", "agent", 60.0)
    assert (second.user, second.timeout_s, second.healthcheck.command) == ("root", 5.0, "true")
    assert (first.min_reward, second.min_reward) == ({"reward": 0.5}, {"style": 1.0})
    assert second.tests == (tmp_path / "steps" / "second" / "tests",)


def test_an_error_in_a_step_names_its_line(tmp_path):
    settings = STEPS + '[steps.verifier.environment]\ndocker_image="x"\nos = "windows"\n'
    error = refusal(write_steps(tmp_path, settings, ("first", "second")))
    assert (error.name, "only linux" in str(error)) == ("verifier.environment.os", True)


def test_a_step_may_have_a_verifier_of_its_own(tmp_path):
    settings = STEPS + '[steps.verifier.environment]\ndocker_image = "judge"\n'
    first, second = read_task(write_steps(tmp_path, settings, ("first", "second"))).steps
    assert (first.verifier.separate, second.verifier.separate.image) == (None, "judge")
    assert (second.verifier.has_tests, second.tests) == (True, ())


@pytest.mark.parametrize("name", ["../out", "a/b", "", "."])
def test_a_steps_name_is_the_name_of_a_folder(tmp_path, name):
    settings = f'[environment]\ndocker_image = "b"\n[[steps]]\nname = "{name}"\n'
    assert refusal(write_files(tmp_path, {"task.toml": settings})).name == "steps.name"


def test_lines_that_mark_a_benchmark_are_not_shown(tmp_path):
    text = "<!-- benchmark data, canary GUID 1 -->\n# CANARY 2\n\nDo it.\n"
    (step,) = read_task(write_task(tmp_path, **{"instruction.md": text})).steps
    assert step.instruction == "Do it."


def test_harborignore_excludes_tests(tmp_path):
    ignored = {
        "tests/.harborignore": "*.log\n/cache/\n",
        "tests/a.log": "",
        "tests/cache/b": "",
        "tests/data/.harborignore": "!kept.log\n",
        "tests/data/kept.log": "",
        "tests/data/d.txt": "",
    }
    write_files(write_task(tmp_path), ignored)
    assert list(selected_files(tmp_path, tmp_path / "tests")) == ["data/d.txt", "data/kept.log", "test.sh"]


def test_a_link_out_of_the_task_is_refused(tmp_path):
    write_task(tmp_path / "task")
    (tmp_path / "task" / "tests" / "leak").symlink_to("/etc/hostname")
    assert refusal(tmp_path / "task").name == "link"


def test_the_digest_changes_with_every_file_and_its_permissions(tmp_path):
    task = read_task(write_task(tmp_path))
    digests = {task.digest()}
    (tmp_path / "tests" / "test.sh").write_text(TEST + "\n")
    digests.add(task.digest())
    (tmp_path / "tests" / "test.sh").chmod(0o644)
    digests.add(task.digest())
    write_files(tmp_path, {"solution/more": ""})
    digests.add(task.digest())
    assert len(digests) == 4


def test_a_folder_of_tasks_gives_them_sorted_and_errors_in_their_places(tmp_path):
    write_task(tmp_path / "b")
    write_task(tmp_path / "a" / "deep")
    write_task(tmp_path / "c", "[environment]\ngpus = 1")
    read = list(read_tasks(tmp_path))
    assert [task.name for task in read] == ["deep", "b", "environment.gpus"]
    with pytest.raises(DataError, match=r"no folder with a task\.toml"):
        task_folders(tmp_path / "b" / "tests")
