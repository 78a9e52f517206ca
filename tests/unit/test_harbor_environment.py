"""Episodes of Harbor tasks: what the policy does, and how it is verified, on sandboxes of the tests' own."""

from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from anyio import to_thread

from envs.contract import stated_timeout_s
from envs.factory import EnvironmentFactory
from envs.harbor.environment import Harbor
from envs.harbor.rewards import reaches, task_parts
from envs.harbor.task_reader import read_task
from envs.sandboxes.contract import FailureKind, Network, SandboxEndedError, SandboxFailure
from envs.snapshot import freeze, thaw
from stream.errors import DataError, EnvironmentFailure
from stream.validity import RewardReason, Unmeasured
from tests.cases.folder_sandboxes import DirectSandboxes, FolderProvider, direct_sandboxes
from tests.cases.harbor_tasks import write_files, write_steps, write_task
from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("needs_sandbox")]

WORK = '[environment]\ndocker_image = "base"\nworkdir = "/work"\n'


@pytest.fixture
def provider(tmp_path: Path) -> FolderProvider:
    provider = FolderProvider(tmp_path / "place")
    provider.make_image("base", {"/etc/tool.conf": "as shipped"})
    return provider


@asynccontextmanager
async def episode(provider, folder: Path, **options):
    """Start an episode of a task."""
    env = Harbor(str(folder), allow_unchecked=True, **options)
    async with direct_sandboxes(provider) as sandboxes:
        await env.reset(str(folder), sandboxes)
        yield env, sandboxes


async def reward_after(provider, folder: Path, *commands: str, **options):
    async with episode(provider, folder, **options) as (env, _):
        for command in commands:
            await env.bash(command)
        return await env.get_reward(), env


async def test_a_task_that_was_done_is_worth_1_and_an_idle_one_0(provider, tmp_path):
    task = write_task(tmp_path / "task", WORK)
    reward, env = await reward_after(provider, task, "touch done")
    assert (reward, env.verifications[0].exit_code, env.tampered_files) == (1.0, 0, [])
    assert (await reward_after(provider, task))[0] == 0.0


async def test_the_policy_reads_output_codes_and_deadlines(provider, tmp_path):
    task = write_task(tmp_path / "task", WORK)
    async with episode(provider, task, command_timeout_s=0.5) as (env, _):
        assert await env.bash("pwd; echo oops >&2; exit 3") == "/work\noops\n(exit code 3)"
        assert await env.bash("true") == "(no output)"
        assert "did not end within 0.5 s" in await env.bash("sleep 60")
        assert "50000 characters in all" in await env.bash("head -c 50000 /dev/zero | tr '\\0' x")
        assert await env.write_file("sub/note.txt", "hej") == "/work/sub/note.txt: 3 bytes written"
        assert await env.bash("cat sub/note.txt") == "hej"


async def test_neither_tests_nor_solution_are_ever_in_the_policys_sandbox(provider, tmp_path):
    task = write_task(tmp_path / "task", WORK)
    async with episode(provider, task) as (env, _):
        assert await env.bash("ls -d /tests /solution 2>/dev/null | wc -l") == "0"
        await env.get_reward()
        assert await env.bash("ls -d /tests /solution 2>/dev/null | wc -l") == "0"


async def test_verification_runs_in_a_fresh_sandbox_that_joins_the_network_and_is_closed(provider, tmp_path):
    task = write_task(tmp_path / "task", WORK)
    async with episode(provider, task) as (env, sandboxes):
        await env.get_reward()
        (_, agent), (purpose, verifier) = sandboxes.opened
        assert (purpose, verifier.spec.joins_network_of) == ("verifier", agent.name)
        assert sandboxes.open_now == [agent]
        await env.get_reward()
        assert len(sandboxes.opened) == 2, "it is verified once"


@pytest.mark.parametrize(
    "attack",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json",
        "mkdir -p /fake; echo 1 > /fake/reward.json; rm -rf /logs/verifier; ln -s /fake /logs/verifier",
        "mkdir /fake; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /fake/test.sh; ln -s /fake /tests",
        "(while :; do echo 1 > /logs/verifier/reward.json; sleep 0.1; done) & sleep 0.3",
    ],
    ids=["text", "json", "linked folder", "own tests", "writer"],
)
async def test_what_the_policy_left_at_the_rewards_place_is_gone(provider, tmp_path, attack):
    assert (await reward_after(provider, write_task(tmp_path / "task", WORK), attack))[0] == 0.0


async def test_a_reward_that_could_not_be_removed_is_not_the_verifiers(provider, tmp_path):
    def leave_reward(sandbox, words):
        if "/logs/verifier" in words and "snapshot" in sandbox.spec.image:
            (sandbox.root / "logs/verifier/reward.json").write_text("1")

    provider.after_exec = leave_reward
    reward, _ = await reward_after(provider, write_task(tmp_path / "task", WORK), "true")
    assert (reward.value, "there before the tests" in reward.detail) == (0.0, True)


async def test_changed_system_files_are_shown_and_worst_if_the_settings_say_so(provider, tmp_path):
    task = write_task(tmp_path / "task", WORK)
    commands = ("echo changed > /etc/tool.conf; echo lib > /etc/ld.so.preload; echo new > /etc/new.conf", "touch done")
    reward, env = await reward_after(provider, task, *commands)
    assert (reward, env.tampered_files) == (1.0, ["/etc/ld.so.preload", "/etc/tool.conf"])
    reward, _ = await reward_after(provider, task, *commands, tampered="worst")
    assert (reward.value, "/etc/tool.conf" in reward.detail) == (0.0, True)


NEEDS_TOOL = '#!/bin/sh\n[ "$(cat /etc/tool.conf)" = "as shipped" ] || exit 3\necho 1 > /logs/verifier/reward.txt\n'


async def test_a_policy_that_breaks_its_verifier_is_measured_0_because_the_control_writes_a_reward(provider, tmp_path):
    task = write_task(tmp_path / "task", WORK, **{"tests/test.sh": NEEDS_TOOL})
    async with episode(provider, task) as (env, sandboxes):
        await env.bash("rm /etc/tool.conf")
        reward = await env.get_reward()
        assert (reward.value, reward.reason, env.verifications[0].is_policys) == (0.0, RewardReason.RAISED, True)
        assert sandboxes.purposes() == ["agent", "verifier", "control"]


async def test_a_verifier_that_never_writes_a_reward_leaves_it_unmeasured(provider, tmp_path):
    task = write_task(tmp_path / "task", WORK, **{"tests/test.sh": "#!/bin/sh\nexit 1\n"})
    reward, env = await reward_after(provider, task, "touch done")
    assert isinstance(reward, Unmeasured)
    assert "neither /logs/verifier/reward.json nor /logs/verifier/reward.txt" in reward.detail
    assert not env.verifications[0].is_policys


async def test_endless_tests_are_the_policys_doing_if_they_end_on_the_untouched_image(provider, tmp_path):
    test = "#!/bin/sh\nwhile [ -e /work/spin ]; do sleep 0.05; done\necho 0 > /logs/verifier/reward.txt\n"
    task = write_task(tmp_path / "task", f"[verifier]\ntimeout_sec = 1\n{WORK}", **{"tests/test.sh": test})
    reward, _ = await reward_after(provider, task, "touch spin")
    assert (reward.value, reward.reason) == (0.0, RewardReason.TIMEOUT)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('echo \'{"reward": 0.25, "style": 1}\' > /logs/verifier/reward.json', 0.25),
        ('echo \'{"style": 1, "speed": 0.5}\' > /logs/verifier/reward.json', {"style": 1.0, "speed": 0.5}),
        ("echo 0.5 > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", 0.5),
        ("echo -2 > /logs/verifier/reward.txt; exit 7", -2.0),
    ],
)
async def test_the_file_alone_decides(provider, tmp_path, script, expected):
    task = write_task(tmp_path / "task", WORK, **{"tests/test.sh": f"#!/bin/sh\n{script}\n"})
    assert (await reward_after(provider, task))[0] == expected


@pytest.mark.parametrize(
    "script",
    [
        "echo nan > /logs/verifier/reward.txt",
        "echo '{}' > /logs/verifier/reward.json",
        "echo 1e300 > /logs/verifier/reward.txt",
        "head -c 4000 /dev/zero | tr '\\0' 9 > /logs/verifier/reward.json",
        'echo \'{"reward": "1"}\' > /logs/verifier/reward.json',
        "ln -s /etc/tool.conf /logs/verifier/reward.txt",
        "head -c 2000000 /dev/zero > /logs/verifier/reward.txt",
        "mkfifo /logs/verifier/reward.json",
    ],
)
async def test_what_is_no_finite_number_in_a_regular_file_is_no_reward(provider, tmp_path, script):
    task = write_task(tmp_path / "task", WORK, **{"tests/test.sh": f"#!/bin/sh\n{script}\n"})
    assert isinstance((await reward_after(provider, task))[0], Unmeasured)


def lose(provider: FolderProvider, times: int, command: str = "/tests/test.sh"):
    """Lose the sandbox in which a command begins, a number of times."""
    lost: list[str] = []

    def on_exec(sandbox, words):
        if len(lost) < times and words[-1] == command and "control" not in sandbox.name:
            lost.append(sandbox.name)
            provider.lost.add(sandbox.name)

    provider.on_exec = on_exec
    return lost


async def test_a_lost_verifier_is_made_again_from_the_snapshot_twice(provider, tmp_path):
    task = write_task(tmp_path / "task", WORK)
    lost = lose(provider, 2)
    reward, _ = await reward_after(provider, task, "touch done")
    assert (reward, len(lost)) == (1.0, 2)


async def test_after_three_lost_verifiers_nothing_is_measured(provider, tmp_path):
    lose(provider, 3)
    with pytest.raises(SandboxFailure) as raised:
        await reward_after(provider, write_task(tmp_path / "task", WORK), "touch done")
    assert raised.value.kind is FailureKind.LOST


async def test_files_from_which_no_sandbox_starts_are_the_policys_doing(provider, tmp_path):
    def refuse(spec):
        if "snapshot" in spec.image:
            raise SandboxFailure(FailureKind.CREATE, "no such file: sh")

    provider.on_create = refuse
    reward, env = await reward_after(provider, write_task(tmp_path / "task", WORK), "true")
    assert (reward.value, env.verifications[0].is_policys) == (0.0, True)
    assert "no sandbox starts" in reward.detail


async def test_a_sandbox_that_is_lost_before_its_first_command_is_the_policys_doing_if_others_run(provider, tmp_path):
    def on_exec(sandbox, words):
        if "snapshot" in sandbox.spec.image:
            provider.lost.add(sandbox.name)

    provider.on_exec = on_exec
    reward, env = await reward_after(provider, write_task(tmp_path / "task", WORK), "true")
    assert (reward.value, env.verifications[0].is_policys) == (0.0, True)


async def test_a_place_that_starts_nothing_leaves_it_unmeasured(provider, tmp_path):
    def refuse(spec):
        raise SandboxFailure(FailureKind.CREATE, "no space left")

    async with episode(provider, write_task(tmp_path / "task", WORK)) as (env, _):
        provider.on_create = refuse
        with pytest.raises(SandboxFailure):
            await env.get_reward()


async def test_a_sandbox_that_ended_by_itself_is_verified_all_the_same(provider, tmp_path):
    async with episode(provider, write_task(tmp_path / "task", WORK)) as (env, sandboxes):
        await env.bash("touch done")
        agent = sandboxes.open_now[0]
        provider.ended.add(agent.name)
        with pytest.raises(SandboxEndedError):
            await env.bash("true")
        assert env.done
        assert await env.get_reward() == 1.0
        assert sandboxes.opened[-1][1].spec.joins_network_of == "", "there is no network to join"


async def test_a_sandbox_whose_files_ended_with_it_is_the_policys_doing(provider, tmp_path, monkeypatch):
    async def none_left(self):
        raise SandboxEndedError("its memory was used up")

    async with episode(provider, write_task(tmp_path / "task", WORK)) as (env, sandboxes):
        await env.bash("touch done")
        monkeypatch.setattr(type(sandboxes.open_now[0]), "snapshot", none_left)
        reward = await env.get_reward()
    assert (reward.value, env.verifications[0].is_policys) == (0.0, True)
    assert "memory" in reward.detail


SEPARATE = f"""artifacts = [{{ source = "/work/out", exclude = ["*.tmp"] }}]
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "cp /etc/tool.conf /work/out/conf"
{WORK}"""
SEPARATE_TEST = """#!/bin/sh
[ -e /work/done ] && exit 1
ls /work/out /logs/artifacts > /logs/verifier/seen
[ "$(cat /work/out/answer)" = 42 ] && [ -e /work/out/conf ] && [ ! -e /work/out/b.tmp ] && score=1
echo "${score:-0}" > /logs/verifier/reward.txt
"""


async def test_a_separate_verifier_gets_the_artifacts_alone(provider, tmp_path):
    task = write_task(tmp_path / "task", SEPARATE, **{"tests/test.sh": SEPARATE_TEST})
    work = "mkdir out; echo 42 > out/answer; touch done out/b.tmp; ln -s /etc/passwd out/link"
    reward, env = await reward_after(provider, task, work)
    assert (reward, env.tampered_files) == (1.0, [])
    assert (await reward_after(provider, task, "mkdir out; echo 41 > out/answer"))[0] == 0.0


async def test_a_hook_that_fails_is_the_policys_doing_if_it_works_on_the_untouched_image(provider, tmp_path):
    hook = SEPARATE.replace("cp /etc/tool.conf /work/out/conf", "test -e /etc/tool.conf")
    task = write_task(tmp_path / "task", hook, **{"tests/test.sh": SEPARATE_TEST})
    reward, _ = await reward_after(provider, task, "rm /etc/tool.conf")
    assert (reward.value, "the hook" in reward.detail) == (0.0, True)
    broken = SEPARATE.replace("cp /etc/tool.conf", "cp /missing")
    task = write_task(tmp_path / "other", broken, **{"tests/test.sh": SEPARATE_TEST})
    assert isinstance((await reward_after(provider, task, "mkdir out"))[0], Unmeasured)


async def test_artifacts_of_a_sandbox_that_ended_come_from_its_files(provider, tmp_path):
    settings = SEPARATE.replace('[[verifier.collect]]\ncommand = "cp /etc/tool.conf /work/out/conf"\n', "")
    task = write_task(
        tmp_path / "task", settings, **{"tests/test.sh": SEPARATE_TEST.replace("[ -e /work/out/conf ] &&", "")}
    )
    async with episode(provider, task) as (env, sandboxes):
        await env.bash("mkdir out; echo 42 > out/answer")
        provider.ended.add(sandboxes.open_now[0].name)
        assert await env.get_reward() == 1.0


STEPS = f"""{WORK}
[[steps]]
name = "one"
min_reward = 1
[[steps]]
name = "two"
[[steps]]
name = "three"
"""


def steps_task(folder: Path, settings: str = STEPS) -> Path:
    write_steps(folder, settings, ("one", "two", "three"))
    for name in ("one", "two", "three"):
        test = f"#!/bin/sh\n[ -e /work/{name} ] && r=1\necho ${{r:-0}} > /logs/verifier/reward.txt\n"
        write_files(folder, {f"steps/{name}/tests/test.sh": test})
    setup = "#!/bin/sh\necho ready > prepared\n"
    return write_files(folder, {"steps/two/workdir/setup.sh": setup, "steps/two/workdir/input": "for two"})


async def test_steps_follow_one_another_and_each_has_a_part(provider, tmp_path):
    async with episode(provider, steps_task(tmp_path / "task")) as (env, _):
        await env.bash("touch one")
        assert await env.respond("done") == "Do two.\n"
        assert await env.bash("cat prepared input") == "ready\nfor two"
        assert await env.respond("done") == "Do three.\n"
        await env.bash("touch three")
        assert await env.respond("done") is None
        assert await env.get_reward() == pytest.approx({"one": 1 / 3, "two": 0, "three": 1 / 3})
        assert len(env.verifications) == 3


async def test_below_min_reward_no_further_step_is_played_and_those_count_0(provider, tmp_path):
    async with episode(provider, steps_task(tmp_path / "task")) as (env, _):
        assert await env.respond("done") is None
        assert await env.get_reward() == {"one": 0, "two": 0, "three": 0}


async def test_an_episode_that_is_cut_off_is_verified_where_it_stood(provider, tmp_path):
    async with episode(provider, steps_task(tmp_path / "task")) as (env, _):
        await env.bash("touch one")
        await env.respond("done")
        await env.bash("touch two")
        assert await env.get_reward() == pytest.approx({"one": 1 / 3, "two": 1 / 3, "three": 0})


@pytest.mark.parametrize("broken", ["setup", "healthcheck"])
async def test_a_later_step_that_cannot_begin_is_the_policys_doing(provider, tmp_path, broken):
    settings = STEPS + '[steps.healthcheck]\ncommand = "test ! -e /work/bad"\ninterval_sec = 0\n'
    task = steps_task(tmp_path / "task", settings if broken == "healthcheck" else STEPS)
    write_files(task, {"steps/three/workdir/setup.sh": "test ! -e /work/bad\n"} if broken == "setup" else {})
    async with episode(provider, task) as (env, _):
        await env.bash("touch one two bad")
        assert await env.respond("done") == "Do two.\n"
        assert await env.respond("done") is None
        assert await env.get_reward() == pytest.approx({"one": 1 / 3, "two": 1 / 3, "three": 0})


async def test_a_healthcheck_may_pass_late_and_failures_at_the_start_do_not_count(provider, tmp_path):
    check = '[environment.healthcheck]\ncommand = "echo x >> /work/tries; [ $(wc -l < /work/tries) -ge 4 ]"\n'
    check += "retries = 1\nstart_period_sec = 20\nstart_interval_sec = 0.01\n"
    async with episode(provider, write_task(tmp_path / "task", WORK + check)) as (env, _):
        assert await env.bash("wc -l < tries") == "4"


async def test_a_healthcheck_that_fails_is_no_fault_of_the_policy(provider, tmp_path):
    check = '[environment.healthcheck]\ncommand = "false"\nretries = 2\ninterval_sec = 0\n'
    env = Harbor(str(tmp_path), allow_unchecked=True)
    async with direct_sandboxes(provider) as sandboxes:
        with pytest.raises(EnvironmentFailure, match="healthcheck failed 2 times"):
            await env.reset(str(write_task(tmp_path / "task", WORK + check)), sandboxes)


async def test_users_of_policy_and_verifier_are_the_tasks(provider, tmp_path):
    settings = f"[agent]\nuser = 1000\n[verifier]\nuser = 0\n{WORK}"
    test = "#!/bin/sh\n[ $(stat -c %a /logs/verifier) = 755 ] && id -u > /logs/verifier/reward.txt\n"
    task = write_task(tmp_path / "task", settings, **{"tests/test.sh": test})
    async with episode(provider, task) as (env, _):
        assert await env.bash("id -u") == "1000"
        assert await env.get_reward() == 0.0


async def test_secrets_reach_the_verifier_alone_and_are_not_recorded(provider, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret-value")
    settings = f'[verifier.env]\nKEY = "${{JUDGE_KEY}}"\nLEVEL = "${{LEVEL:-2}}"\n{WORK}'
    test = '#!/bin/sh\necho "$KEY $LEVEL"; [ "$KEY" ] && echo $LEVEL > /logs/verifier/reward.txt\n'
    task = write_task(tmp_path / "task", settings, **{"tests/test.sh": test})
    reward, env = await reward_after(provider, task, secrets=["JUDGE_KEY"])
    assert (reward, env.verifications[0].output) == (2.0, "*** 2")
    with pytest.raises(EnvironmentFailure, match=r"list it in args\.secrets"):
        await reward_after(provider, task)
    policy = write_task(tmp_path / "other", WORK + 'env = { KEY = "${JUDGE_KEY}" }\n')
    with pytest.raises(EnvironmentFailure, match="the policy gets no secrets"):
        await reward_after(provider, policy, secrets=["JUDGE_KEY"])


async def test_a_live_task_is_verified_in_the_policys_sandbox_and_marked(provider, tmp_path):
    task = write_task(tmp_path / "task", WORK)
    async with episode(provider, task, live=["task"]) as (env, sandboxes):
        await env.bash("touch done")
        assert await env.get_reward() == 1.0
        assert (env.verifications[0].forgeable, sandboxes.purposes()) == (True, ["agent"])


async def test_an_episode_is_frozen_without_sandboxes_and_options(provider, tmp_path):
    args = {"path": str(tmp_path), "allow_unchecked": True}
    factory = await to_thread.run_sync(EnvironmentFactory.load, "harbor", args)
    assert [tool.name for tool in factory.tools] == ["bash", "write_file"]
    env = factory.make()
    async with direct_sandboxes(provider) as sandboxes:
        await env.reset(str(write_task(tmp_path / "task", WORK)), sandboxes)
        await env.get_reward()
        thawed = thaw(freeze(env, 100_000), factory)
    assert (thawed.task, thawed.rewards, thawed.verifications[0].exit_code) == ("task", [{"reward": 0.0}], 0)


async def test_a_provider_without_images_is_refused(tmp_path):
    provider = FolderProvider(tmp_path / "place")
    provider.has_images = False
    env = Harbor(str(tmp_path), allow_unchecked=True)
    with pytest.raises(EnvironmentFailure, match=r"sandboxes\.provider"):
        await env.reset(str(write_task(tmp_path / "task", WORK)), DirectSandboxes(provider))


@pytest.mark.parametrize(("most", "given"), [(Network.OFF, Network.OFF), (Network.OPEN, Network.OPEN)])
async def test_a_tasks_network_is_cut_to_what_the_run_allows(provider, tmp_path, most, given):
    env = Harbor(str(tmp_path), allow_unchecked=True)
    async with direct_sandboxes(provider) as sandboxes:
        sandboxes.network = most
        await env.reset(str(write_task(tmp_path / "task", WORK)), sandboxes)
        await env.get_reward()
    assert [sandbox.spec.network for _, sandbox in sandboxes.opened] == [given, given]


async def test_the_environment_states_its_own_deadlines(provider, tmp_path):
    settings = f"[agent]\ntimeout_sec = 40\n[verifier]\ntimeout_sec = 30\n{WORK}"
    async with episode(provider, write_task(tmp_path / "task", settings), timeout_multiplier=2) as (env, _):
        assert stated_timeout_s(env, "get_reward", 30) == 4 * 90
        assert stated_timeout_s(env, "bash", 30) == 120
        assert env.episode_timeout_s == 80


def test_rows_are_the_tasks_that_were_found_sound(tmp_path):
    write_task(tmp_path / "b", '[metadata]\nlevel = "easy"')
    write_task(tmp_path / "a")
    write_task(tmp_path / "c", "[environment]\ngpus = 1")
    rows = Harbor(str(tmp_path), allow_unchecked=True).rows()
    assert [(row["name"], row["prompt"]) for row in rows] == [(n, "Make the file /work/done.\n") for n in ("a", "b")]
    assert (rows[1]["task"], rows[1]["metadata"]) == (str(tmp_path / "b"), {"level": "easy"})
    with pytest.raises(DataError, match="penstock check harbor"):
        Harbor(str(tmp_path)).rows()
    with pytest.raises(DataError, match=r"args\.eval_path"):
        Harbor(str(tmp_path)).rows("eval")


def test_the_last_steps_reward_is_the_tasks_only_if_it_was_played(tmp_path):
    task = read_task(steps_task(tmp_path, 'multi_step_reward_strategy = "final"\n' + STEPS))
    assert task_parts(task, [{"reward": 1.0}, {"reward": 0.0}, {"reward": 0.5}]) == 0.5
    assert task_parts(task, [{"reward": 1.0}]) == 0.0


def test_a_missing_key_does_not_reach_its_minimum():
    assert reaches({"a": 1.0, "b": 0.5}, {"a": 1, "b": 0.5})
    assert not reaches({"a": 1.0}, {"b": -5})
