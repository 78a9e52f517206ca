"""TRL's environments and reward functions, by reference, unmodified, from a checkout that the tester names.

`PENSTOCK_TRL` names a checkout of TRL at v1.9.0; the Wordles also need `PENSTOCK_OPENENV`, a checkout of OpenEnv at
v0.3.0 with the client that they import. OpenEnv's client library is 0.2, because those classes need its synchronous
calls; the servers are 0.3. The `echo_env` that they import is the one that `openenv init echo_env` makes.
"""

import json
import re
from functools import partial
from itertools import count

import anyio
import pytest

from envs.factory import EnvironmentFactory
from envs.rewards import RewardBatch, RewardFunction
from envs.rewards.parts import merge_parts
from envs.snapshot import thaw
from stream.records import Group, Prompt
from stream.validity import Measured, RewardReason
from tests.adapters.episodes import completions, train
from tests.adapters.servers import HERE, OPENENV_OLD, checkout, openenv_init, openenv_server, virtual_environment
from tests.adapters.sources import source_of, written
from tests.e2e.conftest import project, random_model  # noqa: F401  (fixtures)
from tests.unit.test_episode import call
from workers.rollout.environment_pool import EnvironmentPool

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the websockets library, for the old client
]


async def load(file, name):
    return await anyio.to_thread.run_sync(EnvironmentFactory.load, f"{file}:{name}")


async def rewards(file, factory, episodes, name="reward_func"):
    """Call TRL's reward function on completions, given the snapshots."""
    function = await anyio.to_thread.run_sync(partial(RewardFunction.load, f"{file}:{name}"))
    assert [completion.failure for completion in episodes] == [None] * len(episodes)
    kept = [thaw(completion.snapshot, factory) for completion in episodes]
    return await function(
        RewardBatch.from_group(Group(prompt=Prompt(id="p", messages=[]), completions=episodes), kept), 10
    )


@pytest.fixture(scope="module")
def trl():
    """A checkout of TRL."""
    return checkout("PENSTOCK_TRL")


@pytest.fixture(scope="module")
def client():
    """The packages of OpenEnv's client."""
    (packages,) = (virtual_environment("openenv", OPENENV_OLD).parent.parent / "lib").glob("python*/site-packages")
    return packages


@pytest.fixture(scope="module")
def echo(trl, client, tmp_path_factory):
    """The script `echo.py`, and the echo environment."""
    folder, script = tmp_path_factory.mktemp("echo"), trl / "examples" / "scripts" / "openenv" / "echo.py"
    made = openenv_init(folder)
    imports = "from types import SimpleNamespace\nfrom echo_env import EchoEnv\nfrom echo_env.models import EchoAction"
    parts = [source_of(script, name) for name in ("EchoToolEnv", "reward_func")]
    with openenv_server("echo_app:app", folder, HERE / "openenv", made) as url:
        host = f"SimpleNamespace(env_host={url.replace('ws', 'http', 1)!r})"
        yield written(folder / "echo.py", *parts, imports=imports, paths=(client, folder), args=host)


@pytest.fixture(scope="module")
def wordles(trl, client, tmp_path_factory):
    """The scripts `wordle.py` and `multi_env.py` by name, and a Wordle that needs no word lists."""
    folder, scripts = tmp_path_factory.mktemp("wordle"), trl / "examples" / "scripts" / "openenv"
    paths = (client, checkout("PENSTOCK_OPENENV") / "envs")
    imports = "from textarena_env import TextArenaAction, TextArenaEnv"
    one = [source_of(scripts / "wordle.py", name) for name in ("WordleEnv", "reward_func")]
    several = [source_of(scripts / "multi_env.py", name) for name in ("MultiEnv", "wordle_reward", "catch_reward")]
    with openenv_server("wordle_server:app", folder, HERE / "openenv") as url:
        address = repr(url.replace("ws", "http", 1))
        yield {
            "wordle": written(folder / "wordle.py", *one, imports=imports, paths=paths, env_url=address),
            "multi_env": written(
                folder / "multi_env.py",
                *several,
                imports=imports,
                paths=paths,
                DEFAULT_WORDLE_URL=address,
                DEFAULT_CATCH_URL="'http://127.0.0.1:9'",
            ),
        }


@pytest.fixture
def wordle(wordles):
    """The script `wordle.py`."""
    return wordles["wordle"]


def guess(word):
    return call("guess", json.dumps({"guess": f"[{word}]"}))


def increment(step):
    return call("increment", json.dumps({"step": step}))


async def test_the_echo_example_runs_and_its_reward_function_reads_each_snapshot(echo):
    factory = await load(echo, "EchoToolEnv")
    assert [(tool.name, tool.description) for tool in factory.tools] == [
        ("echo", "Echo the message back from the environment.")
    ]
    results = []
    async with EnvironmentPool({"it": factory}, size=1) as pool:  # the slot's instance serves successive episodes
        for text in ("four", "seven77"):
            results += await completions(factory, [call("echo", json.dumps({"message": text})), "Done."], pool=pool)
    assert [completion.messages[1]["content"] for completion in results] == ["four", "seven77"]
    assert await rewards(echo, factory, results) == [Measured(pytest.approx(0.4)), Measured(pytest.approx(0.7))]


async def test_wordle_episodes_run_concurrently(wordle):
    factory = await load(wordle, "WordleEnv")
    result = await completions(factory, [guess("slate"), guess("crane"), guess("crane"), "Done."], n=4)
    assert await rewards(wordle, factory, result) == [Measured(1.0)] * 4
    for completion in result:
        assert completion.failure is None
        assert completion.prompt_messages[-1]["content"].startswith("Go.You are playing Wordle.")
        assert completion.messages[1]["content"].strip() == "Feedback: slate XXGXG"
        assert len(completion.messages) == 4, "the environment is done after the right word"


async def test_an_invalid_move_in_wordle_scores_0(wordle):
    factory = await load(wordle, "WordleEnv")
    (completion,) = await completions(factory, [guess("slate"), guess("no"), "Done."])
    assert await rewards(wordle, factory, [completion]) == [Measured(0.0)]


async def test_a_nan_reward_in_wordle_is_none_on_the_wire_and_invalid(wordle):
    factory = await load(wordle, "WordleEnv")
    (completion,) = await completions(factory, [guess("nan"), "Done."])
    (reward,) = await rewards(wordle, factory, [completion])
    assert not isinstance(reward, Measured)


async def test_the_multi_env_example_routes_by_a_column_and_none_is_unmeasured(wordles):
    file = wordles["multi_env"]
    factory = await load(file, "MultiEnv")
    assert [tool.name for tool in factory.tools] == ["guess", "move", "stay"]
    says = [call("stay"), guess("crane"), "Done."]
    (completion,) = await completions(factory, says, fields={"env": "wordle"})
    assert completion.messages[1]["content"] == "Error: ValueError: stay is only available in Catch"
    assert await rewards(file, factory, [completion], "wordle_reward") == [Measured(1.0)]
    (other,) = await rewards(file, factory, [completion], "catch_reward")
    assert other.reason is RewardReason.MISSING


CLIENTS = """
from types import SimpleNamespace


class Client:
    def __init__(self, base_url):
        self.text = "Play Wordle. "

    def close(self):
        pass


class TextArenaEnv(Client):
    def reset(self):
        return self.answer(0.0, False)

    def step(self, action):
        self.text += f"You guessed {action.message}. "
        return self.answer(float(action.message == "[crane]"), True)

    def answer(self, reward, done):
        observation = SimpleNamespace(messages=[SimpleNamespace(content=self.text)])
        return SimpleNamespace(observation=observation, reward=reward, done=done)


class OpenSpielEnv(Client):
    def reset(self):
        return self.answer(0.0, False)

    def step(self, action):
        return self.answer(1.0 if action.action_id == 2 else -1.0, True)

    def answer(self, reward, done):
        state = [0.0] * 50
        state[3] = state[47] = 1.0
        return SimpleNamespace(observation=SimpleNamespace(done=done, info_state=state), reward=reward)


TextArenaAction = OpenSpielAction = SimpleNamespace
"""
"""Stand-ins for the clients of OpenEnv's servers, with their interface."""


async def test_the_example_with_several_environments_trains_if_none_is_not_applicable(
    trl,
    tmp_path,
    project,  # noqa: F811
):
    script = trl / "examples" / "scripts" / "openenv" / "multi_env.py"
    names = ("_format_catch_obs", "MultiEnv", "wordle_reward", "catch_reward")
    file = written(
        tmp_path / "multi_env.py",
        *(source_of(script, name) for name in names),
        imports=CLIENTS,
        DEFAULT_WORDLE_URL="'w'",
        DEFAULT_CATCH_URL="'c'",
        CATCH_ROWS="10",
        CATCH_COLS="5",
    )
    episodes = count()

    def say(text, _nth):
        """Win every second episode."""
        if "<tool_response>" in text:
            return "Done."
        right = next(episodes) % 2
        if "Wordle" in text:
            return guess("crane" if right else "slate")
        return call("move", json.dumps({"direction": "right" if right else "left"}))

    project.table["data"]["columns"] = {"env": "game"}
    prompts = project.prompts
    project.prompts = lambda n: prompts(
        0, "".join(json.dumps({"prompt": "Go.", "game": ("wordle", "catch")[i % 2]}) + "\n" for i in range(n))
    )
    functions = [{"ref": f"{file}:{name}", "none": "not_applicable"} for name in ("wordle_reward", "catch_reward")]
    trained = await train(project, f"{file}:MultiEnv", say, rewards=functions)
    assert (trained.summary["groups_trained"], trained.summary["dead"]) == (4, 0), trained.summary
    for step in trained.metrics:
        assert (step["rows/valid"], step["reward/min"], step["reward/mean"], step["reward/max"]) == (4, 0.0, 0.5, 1.0)
    parts = {key.split("/")[2] for step in trained.metrics for key in step if key.startswith("reward/part/")}
    assert parts == {"wordle_reward", "catch_reward"}


async def test_the_documented_environment_chooses_its_task_and_scores_itself(trl, tmp_path):
    page = trl / "docs" / "source" / "grpo_trainer.md"
    file = written(tmp_path / "increment.py", source_of(page, "IncrementEnv"), imports="import random")
    factory = await load(file, "IncrementEnv")
    assert [tool.name for tool in factory.tools] == ["increment"]
    result = await completions(factory, [*[increment(1)] * 3, "Done."], n=12)
    for completion in result:
        asked = int(re.search(r"Increment the counter by (\d)\.", completion.prompt_messages[-1]["content"])[1])
        assert [message["content"] for message in completion.messages if message["role"] == "tool"] == ["1", "2", "3"]
        assert merge_parts(completion.parts) == Measured(float(asked == 3))


async def test_a_run_trains_on_the_documented_environment(
    trl,
    tmp_path,
    project,  # noqa: F811
):
    page = trl / "docs" / "source" / "grpo_trainer.md"
    file = written(tmp_path / "increment.py", source_of(page, "IncrementEnv"), imports="import random")
    episodes = count()

    def say(text, _nth):
        """Answer alternately with the requested number and with 7, which is never right."""
        target = int(re.search(r"Increment the counter by (\d)\.", text)[1])
        return "Done." if "<tool_response>" in text else increment((target, 7)[next(episodes) % 2])

    trained = await train(project, f"{file}:IncrementEnv", say)
    assert (trained.summary["groups_trained"], trained.summary["dead"]) == (4, 0), trained.summary
    for step in trained.metrics:
        assert (step["reward/min"], step["reward/mean"], step["reward/max"]) == (0.0, 0.5, 1.0)


async def test_the_documented_environment_takes_its_task_from_a_data_set(trl, tmp_path):
    page = trl / "docs" / "source" / "grpo_trainer.md"
    file = written(tmp_path / "increment.py", source_of(page, "IncrementEnv", nth=1))
    factory = await load(file, "IncrementEnv")
    values = []
    async with EnvironmentPool({"it": factory}, size=1) as pool:  # the counter restarts with each episode
        for target in (2, 3):
            (completion,) = await completions(factory, [increment(2), "Done."], pool=pool, fields={"target": target})
            values.append(merge_parts(completion.parts))
    assert values == [Measured(1.0), Measured(0.0)]


async def test_the_2048_example_is_scored_from_its_snapshot(trl, tmp_path):
    script = trl / "examples" / "scripts" / "grpo_2048.py"
    parts = [source_of(script, name) for name in ("Game2048Env", "reward_score")]
    file = written(tmp_path / "grpo_2048.py", *parts, imports="import random")
    factory = await load(file, "Game2048Env")
    says = [*(call("move", f'{{"direction": "{way}"}}') for way in ["left", "down", "right"] * 7), "Done."]
    result = await completions(factory, says, n=4, max_turns=30, max_tool_calls=30)
    scores = [float(re.match(r"score=(\S+)", completion.messages[-2]["content"])[1]) for completion in result]
    assert await rewards(file, factory, result, "reward_score") == [Measured(score) for score in scores]
    assert len(set(scores)) > 1


async def test_the_environments_of_trls_own_tests_run(trl, tmp_path):
    tests = trl / "tests" / "test_grpo_trainer.py"
    several = "test_train_with_multiple_environments"
    file = written(
        tmp_path / "several.py",
        *(source_of(tests, f"{several}.{name}") for name in ("CounterEnvironment", "EchoEnvironment")),
        source_of(tests, "test_train_with_environment_owned_reward.DummyEnvironment"),
        reset_kwargs_seen='{"counter": [], "echo": []}',
        tool_calls_made='{"increment": [], "shout": []}',
    )
    (counted,) = await completions(await load(file, "CounterEnvironment"), [increment(4), "Done."])
    assert (counted.prompt_messages[-1]["content"], counted.messages[1]["content"]) == ("Go.Count.", "4")
    (echoed,) = await completions(await load(file, "EchoEnvironment"), [call("shout", '{"text": "hi"}'), "Done."])
    assert (echoed.prompt_messages[-1]["content"], echoed.messages[1]["content"]) == ("Go.Echo.", "HI")
    says = [increment(2), call("decrement", '{"step": 2}'), "Done."]
    (owned,) = await completions(await load(file, "DummyEnvironment"), says)
    assert (merge_parts(owned.parts), owned.tool_errors) == (Measured(2.0), 1)
