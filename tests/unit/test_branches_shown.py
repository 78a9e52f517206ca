"""The branches of an agent's conversation as people see them: as a value, in the terminal, and in exports."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from stream.records import Branch, BranchRole, Completion, Group, Prompt, TrainedCompletion
from tests.cases.agent_completion import agent_completion, trained_agent
from tests.cases.run_folders import ArchivedRun
from workers.cli import penstock
from workers.runs.branches import MAX_DEPTH, branch_labels, branch_lines, describe_branches, message_branches
from workers.runs.transcript import conversation, paragraphs
from workers.terminal.lines import compact_lines, paragraph_lines


def lines(completion: Completion, trained: TrainedCompletion | None = None) -> list[str]:
    return branch_lines(describe_branches(completion, trained))


def branched(*branches: Branch) -> Completion:
    return Completion(index=0, branches=list(branches))


def heads(*branches: Branch) -> list[str]:
    return [f"{view.tree}{view.label} {view.origin}".rstrip() for view in describe_branches(branched(*branches))]


def main(**fields) -> Branch:
    return Branch(role=BranchRole.MAIN, turns=1, **fields)


def compact(**fields) -> Branch:
    return Branch(role=BranchRole.COMPACT, turns=1, **fields)


def sub(**fields) -> Branch:
    return Branch(role=BranchRole.SUB, turns=1, **fields)


def test_a_tree_has_a_line_for_each_branch_with_its_tokens_and_what_was_trained():
    assert lines(agent_completion(), trained_agent()) == [
        "main 1                           2 turns, 7 tokens, 2 rows, trained, row 1 rewritten by template",
        "├─ sub search 1                  2 turns, 5 tokens, loss on 4",
        "│  └─ sub search 2 after turn 1  1 turn, 1 token, not trained (superseded), limit length",
        "└─ compact after turn 2          1 turn, 6 tokens, trained",
        "side                             1 turn, 2 tokens, not trained (role)",
        "main 2 from compact              1 turn, 8 tokens, trained",
    ]


def test_the_page_shows_this_tree():
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    tree = "\n           ".join(lines(agent_completion(), trained_agent()))
    assert f"```\nbranches   {tree}\nbranch     main 1\n" in page


def losses(trained: TrainedCompletion | None) -> list[int | None]:
    return [view.loss_tokens for view in describe_branches(agent_completion(), trained)]


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (None, [None] * 6),
        (trained_agent(), [7, 4, 0, 6, 0, 8]),
        (TrainedCompletion("dropped:zero_variance", None, 0), [0] * 6),
        (TrainedCompletion("valid", 0.5, 26), [7, 5, 0, 6, 0, 8]),  # 29 sampled ones, less those of discarded branches
        (TrainedCompletion("valid", 0.5, 25), [None, None, 0, None, 0, None]),
        (replace(trained_agent(), rows=trained_agent().rows[:1]), [None] * 6),
        (replace(trained_agent(), rows=trained_agent().rows[:4]), [7, 4, None, None, 0, None]),
    ],
)
def test_tokens_with_loss_are_those_of_the_step_as_far_as_they_are_recorded(trained, expected):
    assert losses(trained) == expected


def test_a_discarded_branch_that_was_trained_all_the_same_is_seen():
    rows = list(trained_agent().rows)
    rows[2] = rows[0]  # the row of `side`: all of its tokens bear loss
    found = lines(agent_completion(), TrainedCompletion("valid", 0.5, 27, tuple(rows)))
    assert found[4].endswith("1 turn, 2 tokens, trained")


def test_what_is_not_known_is_not_said():
    assert [line.split("  ")[-1] for line in lines(agent_completion())][3:4] == ["1 turn, 6 tokens"]
    [line] = lines(agent_completion(), TrainedCompletion("reward:timeout", None, 0))[3:4]
    assert line.endswith("1 turn, 6 tokens, no loss")


def test_a_program_that_compacts_again_and_again_is_a_flat_tree():
    branches = [main()]
    for number in range(0, 40, 2):
        branches += [compact(parent=number, after_turn=1), main(parent=number + 1)]
    found = describe_branches(branched(*branches))
    assert {view.depth for view in found} == {0, 1}
    assert [f"{view.tree}{view.label} {view.origin}".rstrip() for view in found][:4] == [
        "main 1",
        "└─ compact 1 after turn 1",
        "main 2 from compact 1",
        "└─ compact 2 after turn 1",
    ]


def test_a_sub_agent_goes_on_beside_itself_and_another_role_below_the_summary():
    assert heads(main(), sub(parent=0), compact(parent=1), sub(parent=2), main(parent=2)) == [
        "main 1",
        "├─ sub 1",
        "│  └─ compact",
        "│     └─ main 2",
        "└─ sub 2 from compact",
    ]


def test_a_deep_tree_has_few_levels_and_says_what_each_branch_comes_from():
    branches = [Branch(role=BranchRole.OTHER, parent=at - 1 if at else None, after_turn=1) for at in range(20)]
    found = describe_branches(branched(*branches))
    assert max(view.depth for view in found) == MAX_DEPTH - 1
    assert found[-1].origin == "from other 19 after turn 1"
    assert [view.number for view in found] == list(range(20))


@pytest.mark.parametrize("parent", [0, 1, 7, -1])
def test_a_parent_that_is_no_earlier_branch_is_none(parent):
    assert heads(sub(parent=parent), main()) == ["sub", "main"]


def test_a_name_of_many_lines_is_a_short_label():
    assert branch_labels(branched(sub(name="a\n\nb " + "c" * 99))) == ["sub a b " + "c" * 35 + "…"]


def test_messages_are_shown_branch_after_branch_with_the_turns_of_each():
    assert "\n".join(map(str, paragraph_lines(paragraphs(agent_completion()), 120)[6:])) == (
        "branch     main 1\n"
        "user       Which birds are there?\n"
        "assistant  I ask two others.  ← turn 1\n"
        "tool       north: a crane\n"
        "assistant  One more look.  ← turn 2\n"
        "branch     sub search 1, from main 1\n"
        "user       You look for birds. Look in the north.\n"
        "assistant  I go north.  ← turn 1\n"
        "user       Go on.\n"
        "assistant  A crane.  ← turn 2\n"
        "branch     sub search 2, after turn 1 of sub search 1\n"
        "user       Go on.\n"
        "assistant  I rest.  ← turn 1\n"
        "branch     compact, after turn 2 of main 1\n"
        "user       Summarize.\n"
        "assistant  A crane in the north.  ← turn 1\n"
        "branch     side\n"
        "user       Name this task.\n"
        "assistant  Two birds  ← turn 1\n"
        "branch     main 2, from compact\n"
        "user       So far: a crane in the north.\n"
        "assistant  Answer: a crane.  ← turn 1\n"
        "reward     1\n"
        "ended      finished; 8 turns, 29 tokens sampled, version 3"
    )
    assert [message.number for message in conversation(agent_completion())] == list(range(16))


def test_an_answer_that_a_program_made_up_has_no_turn():
    made_up = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "made up"}]
    completion = branched(main(answers=(2,)))
    completion.messages = [*made_up, {"role": "assistant", "content": "sampled"}, {"role": "user", "content": "Bye."}]
    assert message_branches(completion) == [(0, None), (0, None), (0, 1), (0, None)]
    assert [message.turn for message in conversation(completion)] == [None, None, 1, None]


def test_without_recorded_answers_messages_stay_in_their_order_below_the_tree():
    completion = agent_completion()
    completion.branches = [replace(branch, answers=()) for branch in completion.branches]
    shown = [str(line) for line in paragraph_lines(paragraphs(completion), 120)]
    assert shown[0].startswith("branches   main 1")
    assert not [line for line in shown if line.startswith("branch ")]
    texts = [message.text for message in conversation(completion) if not message.is_prompt]
    assert texts == [message["content"] for message in completion.messages]


def test_a_sample_of_a_few_lines_has_no_tree():
    assert [line.kind for line in compact_lines(agent_completion())][:2] == ["branch", "user"]


@pytest.fixture
def folder(tmp_path):
    made = ArchivedRun(tmp_path / "run")
    made.end(Group(prompt=Prompt(id="a", messages=[]), completions=[agent_completion()]), done=[trained_agent()])
    return made.path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(penstock, [*arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_prints_the_tree_with_what_the_step_did(folder):
    text = run("show", str(folder))
    assert "\nbranches   main 1                           2 turns, 7 tokens, 2 rows, trained,\n" in text
    assert "\n           ├─ sub search 1                  2 turns, 5 tokens, loss on 4\n" in text
    assert "\nbranch     compact, after turn 2 of main 1\nuser       Summarize.\n" in text


def test_json_and_exports_have_the_branches_and_no_loss_on_discarded_rows(folder, tmp_path):
    [shown] = map(json.loads, run("show", str(folder), "--json").splitlines())
    assert [branch["number"] for branch in shown["branches"]] == [0, 2, 3, 4, 1, 5]
    assert shown["branches"][2] == {
        "number": 3,
        "label": "sub search 2",
        "role": "sub",
        "name": "search",
        "turns": 1,
        "rows": [4],
        "sampled_tokens": 1,
        "loss_tokens": 0,
        "parent": 2,
        "after_turn": 1,
        "limited": "length",
        "rewritten": [],
        "discarded": "superseded",
    }
    assert shown["branches"][0]["rewritten"] == [{"row": 1, "by": "template"}]
    [line] = map(json.loads, run("export-groups", str(folder), "-").splitlines())
    assert line["branches"] == shown["branches"]
    run("export-groups", str(folder), str(tmp_path / "out.parquet"))
    [row] = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["branches"] == shown["branches"]


def test_rows_of_discarded_branches_have_no_loss_where_the_steps_tokens_are_not_kept(tmp_path):
    made = ArchivedRun(tmp_path / "run")
    done = [TrainedCompletion("valid", 0.5, 26)]
    made.end(Group(prompt=Prompt(id="a", messages=[]), completions=[agent_completion()]), done=done)
    [line] = map(json.loads, run("export-groups", str(made.path), "-").splitlines())
    assert [sum(row["loss_mask"]) for row in line["rows"]] == [4, 3, 0, 5, 0, 6, 8]


def test_a_completion_of_a_single_line_is_shown_as_ever():
    completion = agent_completion(branches=[])
    assert describe_branches(completion) == []
    assert {paragraph.label for paragraph in paragraphs(completion)} == {"user", "assistant", "tool", "reward", "ended"}
