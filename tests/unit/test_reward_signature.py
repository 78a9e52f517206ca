"""TRL's signature in full: trainer_state, log_extra, log_metric; factories; functions for some environments only."""

from functools import partial

import anyio
import pytest

from envs.factory import EnvironmentFactory
from envs.rewards import RewardBatch, RewardFunction
from envs.rewards.call_report import TrainerState
from envs.rewards.loading import CallOptions
from stream.errors import ReferenceNotFoundError, SettingsError
from stream.records import Completion, Group, Prompt
from stream.validity import Measured, RewardReason, Unmeasured
from tests.cases.rows import sampled_row
from tests.unit.test_episode import call
from tests.unit.test_group_checker import SETTINGS
from workers.check.scripted import play
from workers.role.rewards import load_reward_functions
from workers.runs.progress import Progress
from workers.score.worker import score_group
from workers.settings.toml_file import parse_settings
from workers.train.groups.group_checker import GroupChecker

FILE = '''
import time

def reward_func(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    """Example 6 of TRL's GRPO page, shortened."""
    rewards = [1.0 if c == gt else 0.0 for c, gt in zip(completions, ground_truth)]
    if log_extra:
        log_extra("golden_answer", list(ground_truth))
        log_extra("extracted_answer", [c or "[none]" for c in completions])
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
        log_metric("broken", float("nan"))
    return rewards

def curriculum(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step + trainer_state.epoch)] * len(completions)

def max_steps(completions, **kwargs):
    return [kwargs["trainer_state"].max_steps] * len(completions)

def wrong_column(completions, log_extra):
    log_extra("half", [1])
    return [1.0] * len(completions)

def strange_values(completions, log_extra):
    log_extra("value", [object, 10**30])
    return [1.0] * len(completions)

def hangs(completions, set_fallback):
    set_fallback([0.0] * len(completions))
    time.sleep(5)

def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    """TRL's factory of the same name."""
    def soft_overlong_punishment_reward(completion_ids, **kwargs):
        start = max_completion_len - soft_punish_cache
        return [-max(0.0, (len(ids) - start) / soft_punish_cache) for ids in completion_ids]
    return soft_overlong_punishment_reward

def get_constant(value=0.25):
    def constant(completions):
        return [value] * len(completions)
    return constant

def get_nothing(value):
    return value

def get_error(value):
    raise ValueError("no such value")

def by_column(answer, scale=1):
    return [scale * a for a in answer]
'''


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)


def group_of(*texts, environment=None, version=3, epoch=2, **fields):
    completions = [
        Completion(
            index=i,
            rows=[sampled_row([3, 4], [-0.5, -0.5], version=version)],
            messages=[{"role": "assistant", "content": text}],
        )
        for i, text in enumerate(texts)
    ]
    prompt = Prompt(id="d:0:1", messages=[], is_plain_text=True, fields=fields, environment=environment, epoch=epoch)
    return Group(prompt=prompt, completions=completions)


async def scored(group, *refs, **options):
    functions = [
        await anyio.to_thread.run_sync(
            partial(RewardFunction.load, f"mine.py:{r}", call_options=CallOptions(**options))
        )
        for r in refs
    ]
    for function in functions:
        async with function.open():
            await score_group(group, [function], {}, 30)
    return group


def values(group):
    return [completion.reward.value for completion in group.completions]


@pytest.mark.parametrize("processes", [0, 1])
async def test_what_a_function_logs_is_stored_with_the_group_and_its_completions(processes):
    group = await scored(group_of("4", "", ground_truth="4"), "reward_func", processes=processes)
    assert values(group) == [1.0, 0.0]
    assert [completion.extra for completion in group.completions] == [
        {"golden_answer": "4", "extracted_answer": "4"},
        {"golden_answer": "4", "extracted_answer": "[none]"},
    ]
    assert group.logged_metrics == {"accuracy": [0.5]}
    by_row = await scored(group_of("4", "", ground_truth="4"), "reward_func", granularity="row", processes=processes)
    assert by_row.logged_metrics == {"accuracy": [1.0, 0.0]}
    assert by_row.completions[1].extra == group.completions[1].extra


@pytest.mark.parametrize("processes", [0, 1])
async def test_trainer_state_is_when_the_group_was_sampled(processes):
    assert values(await scored(group_of("a", "b"), "curriculum", processes=processes)) == [5.0, 5.0]
    (unknown,) = (await scored(group_of("a"), "max_steps", processes=processes)).completions
    assert unknown.reward.reason is RewardReason.RAISED
    assert "trainer_state has global_step, epoch" in unknown.reward.detail


def test_the_trainers_state_of_a_group_without_tokens_is_the_first_one():
    assert TrainerState.of_group(Group(prompt=Prompt(id="p", messages=[]), completions=[])) == TrainerState()


async def test_a_column_of_the_wrong_length_is_an_error_and_strange_values_are_text():
    (wrong, _) = (await scored(group_of("a", "b"), "wrong_column")).completions
    assert "log_extra('half') got 1 values for 2 completions" in wrong.reward.detail
    strange = await scored(group_of("a", "b"), "strange_values")
    assert [completion.extra["value"] for completion in strange.completions] == ["<class 'object'>", str(10**30)]


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_functions_fallback_is_measured_past_its_deadline_with_the_reason(processes):
    group = await scored(group_of("a", "b"), "hangs", processes=processes, timeout_s=0.3)
    expected = Measured(0.0, RewardReason.TIMEOUT, "hangs: did not return within 0.3 s")
    assert [completion.reward for completion in group.completions] == [expected] * 2


async def test_logged_numbers_and_unjudged_answers_are_metrics_of_the_step():
    checker = GroupChecker(parse_settings(SETTINGS), 10, Progress())
    for texts in (("4", "5"), ("4", "4")):  # the second one is dropped: a tie
        checker.check(await scored(group_of(*texts, version=0, ground_truth="4"), "reward_func"), 0)
    unjudged = group_of("4", "5", version=0)
    unjudged.completions[0].reward = Measured(0.0, RewardReason.TIMEOUT, "hangs")
    unjudged.completions[1].reward = Measured(1.0)
    checker.check(unjudged, 0)
    assert checker.pop_logged() == {"logged/accuracy": 0.75, "reward/unjudged/timeout": 1.0}
    assert checker.pop_logged() == {}


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_factory_is_called_with_its_arguments_and_its_function_measures(processes):
    load = partial(RewardFunction.load, call_options=CallOptions(processes=processes))
    args = {"max_completion_len": 4, "soft_punish_cache": 4}
    function = await anyio.to_thread.run_sync(partial(load, "mine.py:get_soft_overlong_punishment", args=args))
    batch = RewardBatch(["p"] * 2, ["a", "b"], [[1], [1, 2]])
    async with function.open():
        assert await function(batch, 30) == [Measured(-0.25), Measured(-0.5)]
    constant = await anyio.to_thread.run_sync(partial(load, "mine.py:get_constant"))
    async with constant.open():
        assert await constant(batch, 30) == [Measured(0.25)] * 2
    scale = await anyio.to_thread.run_sync(partial(load, "mine.py:by_column", args={"scale": 3}))
    async with scale.open():
        columns = RewardBatch(["p"], ["a"], [[1]], columns={"answer": [2]})
        assert await scale(columns, 30) == [Measured(6.0)]


@pytest.mark.parametrize(
    ("name", "words"),
    [("get_nothing", "is of type int"), ("get_error", "as a factory it raised ValueError: no such value")],
)
def test_a_factory_that_builds_no_function_is_refused_at_the_start(name, words):
    with pytest.raises(ReferenceNotFoundError, match=words):
        RewardFunction.load(f"mine.py:{name}", args={"value": 3})


async def test_a_function_has_no_part_outside_of_its_environments():
    only = RewardFunction(
        lambda completions: [1.0] * len(completions), "only", call_options=CallOptions(environments=("a", "b"))
    )
    everywhere = RewardFunction(lambda completions: [0.5] * len(completions), "everywhere")
    for environment, expected in (("a", ["only", "everywhere"]), ("c", ["everywhere"]), (None, ["everywhere"])):
        group = group_of("x", environment=environment)
        await score_group(group, [only, everywhere], {}, 30)
        assert [part.name for part in group.completions[0].parts] == expected
    alone = group_of("x", environment="c")
    await score_group(alone, [only], {}, 30)
    assert alone.completions[0].reward.reason is RewardReason.MISSING


async def test_none_may_mean_not_applicable_and_a_completion_without_a_part_is_invalid():
    options = CallOptions(none="not_applicable")
    given = [1.0, None, None, Unmeasured(RewardReason.MISSING, "mine")]
    first = RewardFunction(lambda completions: given, "first", call_options=options)
    second = RewardFunction(
        lambda completions: [None, {"a": 2.0, "b": None}, None, 1.0], "second", call_options=options
    )
    group = group_of("x", "x", "x", "x")
    await score_group(group, [first, second], {}, 30)
    assert [[part.name for part in completion.parts] for completion in group.completions] == [
        ["first"],
        ["second.a"],
        [],
        ["first", "second"],
    ]
    assert [getattr(c.reward, "value", None) for c in group.completions] == [1.0, 2.0, None, None]
    assert [c.reward.reason for c in group.completions[2:]] == [RewardReason.MISSING, RewardReason.COMPONENT]


def test_the_settings_limit_a_function_to_environments_that_exist():
    table = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "environments": {"maze": "calculator"},
        "rewards": [{"ref": "mine.py:by_column", "environments": ["maze"], "none": "not_applicable"}],
    }
    (function,) = load_reward_functions(parse_settings(table), "score")
    assert (function.call_options.environments, function.call_options.none) == (("maze",), "not_applicable")
    table["rewards"][0]["environments"] = ["maze", "mase"]
    with pytest.raises(SettingsError, match=r"rewards\[0\].environments names 'mase', which is unknown.* has: maze"):
        parse_settings(table)


class MultiEnv:
    """TRL's `multi_env.py`: one class that plays Wordle or Catch, as the row's column `env` says."""

    def __init__(self):
        self.active = None
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        """Start the game of the row."""
        self.active, self.reward, self.done = kwargs.get("env", "wordle"), 0.0, False
        return f"Play {self.active}."

    def guess(self, guess: str) -> str:
        """Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'
        """
        if self.active != "wordle":
            raise ValueError("guess is only available in Wordle")
        self.reward = float(guess == "[crane]")
        return "GGGGG" if self.reward else "XXXXX"

    def stay(self) -> str:
        """Do nothing and let the ball fall one step."""
        if self.active != "catch":
            raise ValueError("stay is only available in Catch")
        self.reward, self.done = -1.0, True
        return "missed"


def wordle_reward(environments, **kwargs) -> list[float | None]:
    """TRL's function of this name, unmodified."""
    return [env.reward if env.active == "wordle" else None for env in environments]


def catch_reward(environments, **kwargs) -> list[float | None]:
    """TRL's function of this name, unmodified."""
    rewards = []
    for env in environments:
        if env.active != "catch":
            rewards.append(None)
        elif env.done:
            # Catch gives +1 for catching, -1 for missing. Clamp to [0, 1] for GRPO advantage estimation.
            rewards.append(max(env.reward, 0.0))
        else:
            rewards.append(0.0)  # Incomplete episode
    return rewards


async def test_trls_example_with_several_games_in_one_class_is_worth_training_on():
    factory = await anyio.to_thread.run_sync(EnvironmentFactory.from_callable, MultiEnv, {})
    options = CallOptions(none="not_applicable")
    functions = [RewardFunction(f, f.__name__, call_options=options) for f in (wordle_reward, catch_reward)]
    checker = GroupChecker(parse_settings(SETTINGS), 300, Progress())
    for game, turns, expected in (
        ("wordle", (call("guess", '{"guess": "[crane]"}'), call("stay")), [1.0, 0.0]),
        ("catch", (call("stay"), "Done."), [0.0, 0.0]),
    ):
        played = [
            await anyio.to_thread.run_sync(partial(play, MultiEnv, [turn, "Done."], fields={"env": game}))
            for turn in turns
        ]
        group = group_of(*turns, environment="it", version=0, env=game)
        for completion, result in zip(group.completions, played, strict=True):
            completion.snapshot = result.completion.snapshot
        await score_group(group, functions, {"it": factory}, 30)
        assert [[part.name for part in c.parts] for c in group.completions] == [[f"{game}_reward"]] * 2
        assert values(group) == expected
        assert checker.check(group, 0) is not None
    assert checker.pop_logged() == {}
