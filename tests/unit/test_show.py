"""`penstock show` and `penstock export-groups` on a run's folder; nothing of the run is changed."""

import json
from array import array

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from stream.codec import encode
from stream.errors import SettingsError
from stream.records import Completion, Failure, Group, Prompt, RewardPart, TrainedCompletion, TrainedRow
from stream.trainer.ledger_records import Dropped
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.cases import groups
from tests.cases.run_folders import ArchivedRun, write_run
from workers.cli import penstock
from workers.runs.evaluations import evaluated_steps, write_groups
from workers.runs.selection import NumberRange


def completion(index: int, reward: object, **fields) -> Completion:
    kind = Unmeasured(RewardReason.TIMEOUT, "judge: 5 s") if reward is None else Measured(reward)
    said = {
        "prompt_messages": [{"role": "user", "content": "2 + 2?"}],
        "messages": [{"role": "assistant", "content": f"I say {index}."}],
        "parts": [RewardPart(name="exact", reward=kind)],
    }
    return groups.completion(index, kind, (3, 4, 5), logprobs=(-0.5, -1.0, -1.5), **({"version": 1} | said | fields))


EXTRA = {"parsed": "4", "steps": [1, None], "score": {"a": 0.5}}


def group(name: str, *completions: Completion) -> Group:
    prompt = Prompt(id=name, messages=[{"role": "user", "content": "2 + 2?"}], fields={"answer": 4})
    return Group(prompt=prompt, completions=list(completions))


@pytest.fixture
def folder(tmp_path):
    made = ArchivedRun(tmp_path / "run")
    row = TrainedRow(
        loss_mask=b"\1\1\0",
        advantages=array("f", [-0.5]).tobytes(),
        logprob_differences=array("f", [0.25, -0.5, 4.0]).tobytes(),
        rejected_by=b"\0\0\1",
        rules=("token_k1",),
    )
    done = [TrainedCompletion("valid", 0.5, 3), TrainedCompletion("valid", -0.5, 2, (row,))]
    cut = completion(1, 0.0, truncated=TruncationReason.LENGTH)
    made.end(group("a", completion(0, 1.0, extra=EXTRA), cut), 1, done=done)
    done = [TrainedCompletion("dropped:zero_variance", None, 0), TrainedCompletion("rejected:too_old", None, 0)]
    tie = group("b", completion(0, 0.5, version=2), completion(1, 0.5))
    made.end(tie, 2, Dropped("zero_variance"), done=done)
    made.end(group("lost", completion(0, 9.0)), 3, in_ledger=False)
    failed = Completion(index=1, failure=Failure(reason=RolloutReason.ENV_STEP, detail="till: ring: KeyError: 'x'"))
    done = [TrainedCompletion("reward:timeout", None, 0), TrainedCompletion("failed:env_step", None, 0)]
    made.end(group("c", completion(0, None, version=3), failed), 3, done=done)
    return made.path


def run(*arguments: str):
    return CliRunner().invoke(penstock, [*arguments])


def shown(folder, *options: str) -> list[tuple[str, int]]:
    result = run("show", str(folder), "--json", "-n", "99", *options)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return [(line["prompt_id"], line["completion"]) for line in lines]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), [("c", 0), ("c", 1), ("b", 0), ("b", 1), ("a", 0), ("a", 1)]),
        (("--step", "2"), [("b", 0), ("b", 1)]),
        (("--step", "2.."), [("c", 0), ("c", 1), ("b", 0), ("b", 1)]),
        (("--version", "..1"), [("b", 1), ("a", 0), ("a", 1)]),
        (("--reward", "0.5..1"), [("b", 0), ("b", 1), ("a", 0)]),
        (("--end", "length"), [("a", 1)]),
        (("--end", "truncated", "--end", "failed"), [("c", 1), ("a", 1)]),
        (("--end", "dropped"), [("b", 0), ("b", 1)]),
        (("--end", "dropped:zero_variance", "--reward", "0.5"), [("b", 0), ("b", 1)]),
        (("--end", "reward:timeout"), [("c", 0)]),
        (("--prompt", "b"), [("b", 0), ("b", 1)]),
        (("--prompt", "2 + 2", "--step", "1"), [("a", 0), ("a", 1)]),
        (("--invalid",), [("c", 0), ("c", 1)]),
        (("--end", "invalid"), [("c", 0), ("c", 1)]),
        (("--end", "valid", "--step", "1"), [("a", 0), ("a", 1)]),
        (("--best",), [("a", 0), ("b", 0), ("b", 1), ("a", 1)]),
        (("--worst",), [("a", 1), ("b", 0), ("b", 1), ("a", 0)]),
    ],
)
def test_completions_are_filtered_and_ordered(folder, options, expected):
    assert shown(folder, *options) == expected


def test_a_random_choice_is_of_all_and_repeats_with_its_seed(folder):
    choices = [tuple(shown(folder, "--random", "-n", "2", "--seed", str(seed))) for seed in range(12)]
    assert choices == [tuple(shown(folder, "--random", "-n", "2", "--seed", str(seed))) for seed in range(12)]
    assert len(set(choices)) > 4
    assert {found for choice in choices for found in choice} >= {("a", 0), ("b", 1), ("c", 1)}


def test_a_conversation_is_printed_with_reward_validity_and_what_the_step_did(folder):
    result = run("show", str(folder), "--worst", "-n", "1")
    assert result.stdout.splitlines()[0].startswith("── a #1  step 1  trained · advantage -0.5 ──")
    assert "user       2 + 2?\nassistant  I say 1.\nreward     0\n           exact 0\n" in result.stdout
    assert "ended      truncated (length); 1 turn, 3 tokens sampled, version 1" in result.stdout
    assert "1 completion of 4 that match; the archive of r has 3 groups, steps 1 to 3" in result.stdout
    assert "\x1b" not in result.stdout
    text = run("show", str(folder), "--invalid").stdout
    assert "c #0  step 3  trained · no loss: reward:timeout" in text
    assert "invalid    the episode failed (env_step): till: ring: KeyError: 'x'" in text
    dropped = run("show", str(folder), "--end", "dropped").stdout
    assert "b #0  step 2  dropped:zero_variance ──" in dropped
    assert "b #1  step 2  dropped:zero_variance · no loss: rejected:too_old ──" in dropped
    assert dropped.count("trainer    All valid completions have the same reward") == 2


def test_what_does_not_exist_is_answered_with_what_does(folder, tmp_path):
    result = run("show", str(folder), "--step", "7", "--invalid")
    assert result.exit_code == 1
    assert "run 'r' has no completion that matches step 7 and invalid; its archive has 3 groups of steps 1 to 3" in (
        result.output
    )
    assert run("show", str(folder), "--end", "zero").exit_code == 2
    empty = write_run(tmp_path / "empty")
    (empty / "ledger.jsonl").touch()
    assert "run 'r' has no completion yet; its archive has 0 groups" in run("show", str(empty)).output


@pytest.mark.parametrize("text", ["", "..", "a", "2..1", "nan", "1..2..3"])
def test_a_range_has_ends(text):
    with pytest.raises(SettingsError, match="step"):
        NumberRange.parse(text, "step")


def test_an_export_has_tokens_masks_and_the_trainers_advantages(folder):
    result = run("export-groups", str(folder), "--jsonl")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("6 completions")
    lines = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert [(line["prompt_id"], line["completion"], line["advantage"]) for line in lines] == [
        *(("a", 0, 0.5), ("a", 1, -0.5)),
        *(("b", 0, None), ("b", 1, None)),
        *(("c", 0, None), ("c", 1, None)),
    ]
    [row] = lines[0]["rows"]
    assert row["prompt_ids"] == [1, 2]
    assert (row["token_ids"], row["sampled_mask"], row["loss_mask"]) == ([3, 4, 5], [1, 1, 1], [1, 1, 1])
    assert (row["logprobs"], row["versions"]) == ([-0.5, -1.0, -1.5], [1, 1, 1])
    assert lines[4]["rows"][0]["loss_mask"] == [0, 0, 0]
    assert lines[4]["parts"] == [
        {"name": "exact", "weight": 1.0, "turn": None, "value": None, "reason": "timeout", "detail": "judge: 5 s"}
    ]
    assert lines[5]["why_invalid"].startswith("the episode failed (env_step)")
    assert [line["extra"] for line in lines[:2]] == [EXTRA, {}]  # what the reward passed to `log_extra`
    again = run("export-groups", str(folder), "--jsonl")
    assert again.exit_code == 1
    assert "exists already" in again.output


def test_an_export_has_what_the_trainer_decided_about_each_token(folder):
    lines = [json.loads(line) for line in run("export-groups", str(folder), "-").stdout.splitlines()]
    [row] = lines[1]["rows"]
    assert (row["loss_mask"], row["advantages"]) == ([1, 1, 0], [-0.5, -0.5, None])
    assert (row["logprob_differences"], row["rejected_by"]) == ([0.25, -0.5, 4.0], [None, None, "token_k1"])
    assert (lines[0]["rows"][0]["advantages"], lines[0]["rows"][0]["loss_mask"]) == (None, [1, 1, 1])
    [shown] = [json.loads(line) for line in run("show", str(folder), "--end", "length", "--json").stdout.splitlines()]
    assert shown["rows"] == lines[1]["rows"]
    text = run("show", str(folder), "--end", "length").stdout
    assert "trainer    loss on 2 of 3 sampled tokens; 1 rejected by token_k1; log-prob" in text
    (folder / "trained_tokens" / "000001.trained_tokens").unlink()
    lines = [json.loads(line) for line in run("export-groups", str(folder), "-").stdout.splitlines()]
    assert (lines[1]["rows"][0]["loss_mask"], lines[1]["rows"][0]["advantages"]) == (None, None)
    assert "\ntrainer" not in run("show", str(folder), "--end", "length").stdout


def test_parquet_has_the_same_content(folder, tmp_path):
    file = tmp_path / "out.parquet"
    result = run("export-groups", str(folder), str(file), "--step", "1..2")
    assert (result.exit_code, result.output[:13]) == (0, "4 completions"), result.output
    rows = pq.read_table(file).to_pylist()
    assert len(rows) == 4
    lines = [json.loads(line) for line in run("export-groups", str(folder), "-", "--step", "1..2").stdout.splitlines()]
    assert [row["rows"] for row in rows] == [line["rows"] for line in lines]
    assert [row["advantage"] for row in rows] == [line["advantage"] for line in lines]
    assert rows[0]["messages"] == [
        {"role": "assistant", "content": "I say 0.", "tool_calls": None, "tool_call_id": None, "name": None}
    ]
    assert rows[0]["prompt_fields"] == '{"answer":4}'
    assert json.loads(rows[0]["extra"]) == EXTRA


def test_an_export_without_a_format_or_a_match_is_refused_and_leaves_no_file(folder, tmp_path):
    assert "give --jsonl or --parquet" in run("export-groups", str(folder)).output
    result = run("export-groups", str(folder), str(tmp_path / "x.jsonl"), "--step", "9")
    assert "no archived completion matches" in result.output
    assert list(tmp_path.iterdir()) == [folder]


def test_groups_are_listed_with_outcome_and_rewards_and_filtered_by_their_completions(folder):
    result = run("groups", str(folder), "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["prompt_id"], line["outcome"], line["step"]) for line in lines] == [
        ("c", "trained", 3),
        ("b", "dropped:zero_variance", 2),
        ("a", "trained", 1),
    ]
    assert [(line["rewards"], line["valid"], line["reward_mean"]) for line in lines] == [
        ([None, None], 0, None),
        ([0.5, 0.5], 2, 0.5),
        ([1.0, 0.0], 2, 0.5),
    ]
    assert lines[2]["ends"] == ["finished", "length"]
    only = run("groups", str(folder), "--end", "length").stdout
    assert only.splitlines()[1].split() == ["a", "1", "trained", "1", "0.5", "1", "0", "2", "of", "2"]
    assert only.splitlines()[-1] == "1 group, the newest first; the archive has 3"
    assert "\x1b" not in only
    missing = run("groups", str(folder), "--reward", "7..")
    assert "run 'r' has no completion that matches reward 7..; its archive has 3 groups" in missing.output


def test_two_completions_of_a_group_are_shown_side_by_side(folder):
    text = run("show", str(folder), "--prompt", "a", "--diff", "0", "1").stdout
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[0].startswith("── a #0 step 1 trained · advantage +0.5 ─")
    assert "a #1 step 1 trained · advantage -0.5" in rows[0]
    assert rows[1:3] == ["user 2 + 2? user 2 + 2?", "assistant I say 0. assistant I say 1."]
    assert "reward 1 reward 0" in rows
    found = json.loads(run("show", str(folder), "--prompt", "a", "--diff", "1", "0", "--json").stdout)
    assert found["first_different_message"] == 0
    assert [each["completion"] for each in found["completions"]] == [1, 0]
    wrong = run("show", str(folder), "--prompt", "a", "--diff", "0", "5")
    assert "group a has no completion 5; it has 0, 1" in wrong.output


def test_many_equal_lines_of_two_completions_are_left_out(tmp_path):
    made = ArchivedRun(tmp_path / "run")
    same = [{"role": "assistant", "content": "\n".join(f"line {n}" for n in range(50))}]
    pair = [completion(0, 1.0), completion(1, 1.0)]
    for each in pair:
        each.messages = same + each.messages
    made.end(group("long", *pair))
    text = run("show", str(made.path), "--diff", "0", "1").stdout
    assert text.count("… 47 equal lines …") == 2
    assert "line 30" not in text
    assert "line 30" in run("show", str(made.path), "--diff", "0", "1", "--full").stdout


def test_conversations_of_an_evaluation_are_shown_by_the_step_whose_weights_were_measured(folder):
    def evaluated(name: str, *rewards: float) -> bytes:
        prompt = Prompt(id=name, messages=[])
        return encode(Group(prompt=prompt, completions=[completion(at, value) for at, value in enumerate(rewards)]))

    assert "has no completion of an evaluation" in run("show", str(folder), "--eval").output
    write_groups(folder, 5, [evaluated("held:1", 0.25), b"damaged"])
    write_groups(folder, 10, [evaluated("held:0", 1.0, 0.5)])
    assert shown(folder, "--eval", "--worst", "-n", "2") == [("held:1", 0), ("held:0", 1)]
    assert shown(folder, "--eval", "--step", "10") == [("held:0", 0), ("held:0", 1)]
    text = run("show", str(folder), "--eval", "-n", "1").output
    assert "held:0 #0  step 10  evaluated" in text
    assert "assistant  I say 0." in text
    assert "1 completion; step: the one whose weights were evaluated" in text
    assert "leave out --eval" in run("show", str(folder), "--eval", "--diff", "0", "1").output


def test_groups_of_later_steps_and_of_the_oldest_evaluations_are_not_kept(tmp_path):
    for step in (*range(0, 44, 2), 40):
        write_groups(tmp_path, step, [b""])
    assert evaluated_steps(tmp_path) == list(range(40, 2, -2))  # 20 with step 42, which goes
