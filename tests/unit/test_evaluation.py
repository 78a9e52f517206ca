"""Which completions an evaluation counts, and the divisors of its metrics."""

import pytest

from stream.codec import decode
from stream.errors import DataError, SettingsError
from stream.operator.status import EvaluationStatus, RunStatus
from stream.queue.evaluation import PromptEvaluation
from stream.records import Completion, Failure, Group, Prompt, Row, Span
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.cases.evaluations import read_evaluations
from workers.datasets.prompts import read_evaluation_prompts
from workers.evaluate.evaluate import find_policy_folder
from workers.launch.watch import StallDetector
from workers.runs.evaluations import EvaluationResult
from workers.runs.status import evaluation_report, format_result
from workers.score.worker import encode_transcript, evaluate_group
from workers.settings.toml_file import parse_settings
from workers.train.evaluations import EvaluationLog, summarize

TABLE = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "a:b"}]}


def settings(**sections):
    return parse_settings(TABLE | sections)


def completion(index=0, reward=None, versions=(3,), **facts):
    count = len(versions)
    row = Row(
        prompt_ids=bytes(4),
        token_ids=bytes(4 * count),
        sampled_ranges=[(0, count)],
        logprobs=bytes(4 * count),
        spans=[Span(version, i, i + 1) for i, version in enumerate(versions)],
    )
    return Completion(index=index, rows=[row], reward=reward, **facts)


def judged(*completions, **sections):
    group = Group(prompt=Prompt(id="h:0:0", messages=[], environment="e"), completions=list(completions))
    return evaluate_group(group, 3, settings(**sections))


def test_a_transcript_is_the_group_without_final_states_unless_it_is_too_large():
    group = Group(prompt=Prompt(id="p", messages=[]), completions=[Completion(index=0, snapshot=b"x" * 2_000_000)])
    assert decode(encode_transcript(group), Group).completions == [Completion(index=0)]
    assert group.completions[0].snapshot
    group.completions[0].messages = [{"role": "assistant", "content": "x" * 2_000_000}]
    assert encode_transcript(group) == b""


def test_each_completion_is_valid_invalid_or_mixed():
    result = judged(
        completion(reward=Measured(1.0)),
        completion(reward=Measured(0.25)),
        completion(reward=Measured(1.0), versions=(3, 4)),
        completion(reward=Unmeasured(RewardReason.TIMEOUT)),
        completion(),
        completion(failure=Failure(reason=RolloutReason.ENGINE)),
        completion(reward=Measured(1.0), truncated=TruncationReason.LENGTH),
        completion(reward=Measured(1.0), truncated=TruncationReason.WALL_CLOCK),
    )
    assert result == PromptEvaluation(
        environment="e",
        valid=3,
        successes=2,
        reward_sum=2.25,
        invalid={"reward:timeout": 1, "reward:missing": 1, "failed:engine": 1, "truncated:wall_clock": 1},
        mixed_versions=1,
    )


def test_a_completion_with_a_token_of_another_version_is_mixed():
    failed = Failure(reason=RolloutReason.ENGINE)
    result = judged(completion(versions=(2,), failure=failed), completion(versions=(4,), reward=Measured(0.0)))
    assert (result.mixed_versions, result.valid, result.invalid) == (2, 0, {})


def test_a_completion_that_failed_before_sampling_is_invalid():
    result = judged(Completion(index=0, failure=Failure(reason=RolloutReason.ENV_RESET)))
    assert (result.invalid, result.mixed_versions) == ({"failed:env_reset": 1}, 0)


def test_success_depends_on_the_threshold_setting():
    rewards = [completion(reward=Measured(value)) for value in (0.5, 0.4)]
    assert judged(*rewards, algorithm={"success_threshold": 0.5}).successes == 1


OUTCOMES = {
    "h:0:0": PromptEvaluation(environment="a", valid=4, successes=2, reward_sum=2.0),
    "h:0:1": PromptEvaluation(environment="a", valid=1, successes=1, reward_sum=1.0, invalid={"failed:engine": 3}),
    "h:0:2": PromptEvaluation(environment="b", valid=0, mixed_versions=4),
}
PROMPTS = {"h:0:0": ("a", 4), "h:0:1": ("a", 4), "h:0:2": ("b", 4), "h:0:3": ("b", 4)}


def test_both_denominators_match_a_calculation_by_hand():
    score, by_environment = summarize(OUTCOMES, PROMPTS)
    assert (score.prompts, score.n, score.valid, score.mixed) == (4, 16, 5, 4)
    assert score.invalid == {"dead": 4, "failed:engine": 3}
    assert score.mean_valid == 3.0 / 5
    assert score.mean_all == 3.0 / 12
    assert score.pass_at["1"] == {"valid": (0.5 + 1) / 2, "all": (0.5 + 0.25 + 0) / 3}
    assert score.pass_at["2"]["valid"] == pytest.approx(1 - 1 / 6), "the first prompt alone has two valid ones"
    assert score.pass_at["2"]["all"] == pytest.approx(((1 - 1 / 6) + 0.5 + 0) / 3)
    assert score.pass_at["4"] == {"valid": 1.0, "all": pytest.approx(2 / 3)}
    assert by_environment["a"].mean_all == 3.0 / 8
    assert (by_environment["b"].mean_valid, by_environment["b"].mean_all) == (None, 0.0)
    assert by_environment["b"].pass_at["1"] == {"all": 0.0}


def test_missing_prompts_are_counted_apart_from_dead_ones():
    score, _ = summarize({}, {"h:0:0": ("", 2)}, "missing")
    assert (score.invalid, score.mean_all, score.pass_at) == (
        {"missing": 2},
        0.0,
        {"1": {"all": 0.0}, "2": {"all": 0.0}},
    )


def line(step, version=0):
    score, environments = summarize(OUTCOMES, PROMPTS)
    return EvaluationResult(version=version, step=step, time=1.0, seconds=2.0, overall=score, environments=environments)


def test_the_result_of_the_last_step_is_left_for_the_trackers(tmp_path):
    book = EvaluationLog(tmp_path, 0)
    assert book.final_metrics(0) == {}
    book.append(line(2, 3))
    found = book.final_metrics(2)
    assert (found["step"], found["time"], found["eval/version"]) == (2, 1.0, 3)
    assert book.final_metrics(4) == {}


def test_lines_after_the_checkpoint_are_cut_and_written_again(tmp_path):
    book = EvaluationLog(tmp_path, 0)
    for step in (0, 2, 4):
        book.append(line(step, step))
    with (tmp_path / "eval.jsonl").open("a") as file:
        file.write('{"version": 6, "st')
    resumed = EvaluationLog(tmp_path, 3)
    resumed.cut()
    assert [each.step for each in resumed.results] == [0, 2]
    resumed.append(line(4, 7))
    assert [(each.step, each.version) for each in read_evaluations(tmp_path)] == [(0, 0), (2, 2), (4, 7)]
    assert read_evaluations(tmp_path)[0] == line(0)


def test_the_text_of_an_evaluation():
    import msgspec

    report = msgspec.to_builtins(line(2, 3))
    assert format_result({}) == ""
    assert format_result(report).startswith(
        "version 3: mean 0.600 (0.250 of all) · pass@1 0.750 (0.250 of all) · pass@2"
    )
    assert format_result(report).endswith("5 of 16 valid · 4 mixed")
    status = EvaluationStatus(stages={}, version=3, total=8, unfinished=3, results=4)
    assert evaluation_report(status).progress == "version 3: 5 of 8 prompts, 1 dead"
    assert evaluation_report(EvaluationStatus(stages={}, version=3, total=8, finished="1")).progress == ""


def test_an_evaluating_run_counts_as_progressing():
    alarm = StallDetector(10.0, now=0.0)

    def seen(now, open_prompts):
        evaluated = EvaluationStatus(stages={}, version=1, total=5, unfinished=open_prompts)
        status = RunStatus(
            now_ms=0, stages={}, unfinished=4, outstanding=4, dead=0, counts={"fed": 4}, evaluation=evaluated
        )
        return alarm.observe(status, now)

    assert not seen(1.0, 5)
    assert not seen(9.0, 4)
    assert not seen(18.0, 3)
    assert "nothing was trained or dropped" in seen(28.0, 3)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"every": 3}, "eval.path is empty"),
        ({"path": "p", "temperature": 0.0}, "eval.group_size"),
    ],
)
def test_contradictory_settings_are_refused(section, named):
    with pytest.raises(SettingsError, match=named):
        settings(eval=section)


def test_evaluation_gets_at_least_one_group_and_leaves_one_to_training():
    assert [settings(eval={"path": "p"}).evaluation_groups_in_flight(n) for n in (1, 2, 8, 16)] == [1, 1, 2, 4]


def test_held_out_prompts_have_their_own_group_size_and_seeds(tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    prompts, _ = read_evaluation_prompts(settings(eval={"path": str(path), "group_size": 3}))
    assert [(prompt.id, prompt.group_size) for prompt in prompts] == [("held:0:0", 3), ("held:0:1", 3)]
    assert len({prompt.seed for prompt in prompts}) == 2


def test_an_invalid_held_out_row_is_refused_immediately(tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(DataError, match=r"held\.jsonl:2"):
        read_evaluation_prompts(settings(eval={"path": str(path)}))
    path.write_text("")
    with pytest.raises(DataError, match="no prompts"):
        read_evaluation_prompts(settings(eval={"path": str(path)}))


def test_a_policy_is_a_model_a_checkpoint_or_a_runs_latest_checkpoint(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(SettingsError, match="no policy"):
        find_policy_folder(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SettingsError, match="no policy"):
        find_policy_folder(tmp_path)  # a run's folder may contain the model that it began with
    (tmp_path / "checkpoint.json").write_text("{}")
    assert find_policy_folder(tmp_path) == find_policy_folder(tmp_path / "model") == tmp_path / "model"
