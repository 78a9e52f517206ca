"""The dashboard's pages about groups: index, filters, histogram, conversations, tokens."""

import math
import random
from array import array

import anyio.to_thread
import pytest

from stream.codec import encode
from stream.records import (
    Completion,
    Failure,
    Group,
    Prompt,
    RewardPart,
    Row,
    Span,
    ToolRun,
    TrainedCompletion,
    TrainedRow,
)
from stream.trainer.archive import ArchivedGroups
from stream.trainer.ledger_records import Dead, Dropped, Trained
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.cases.groups import completion
from tests.cases.pages import browser, text_of
from tests.cases.run_folders import ArchivedRun
from tests.unit.test_dashboard import evaluation
from workers.dashboard.group_page import FIRST, LAST, visible_parts
from workers.dashboard.groups_page import Bar, histogram, parse_filter
from workers.dashboard.timeline_page import Axis, lanes
from workers.dashboard.token_view import TokenChoice, prompt_text, token_page
from workers.runs.evaluations import write_groups
from workers.runs.export import encode_json
from workers.runs.group_index import GroupIndex, summarize_group
from workers.runs.phases import GroupTimes, StepTimes, main_phases
from workers.runs.selection import CompletionFilter
from workers.runs.transcript import conversation

HOSTILE = "<script>alert(1)</script>\u202eevil\x1b[31m"


class Run(ArchivedRun):
    """A run whose groups have a completion for each reward."""

    def sampled(self, name, step, rewards, outcome=Trained(), *, version=1, text="2 + 2?", in_ledger=True) -> None:  # noqa: B008
        completions = [
            completion(
                at,
                Unmeasured(RewardReason.TIMEOUT, "judge: 5 s") if reward is None else reward,
                (3, 4, 5),
                version=version,
                logprobs=(-0.5, -1.0, -1.5),
                prompt_messages=[{"role": "user", "content": text}],
                messages=[{"role": "assistant", "content": f"I say {at}."}],
                truncated=TruncationReason.LENGTH if reward == 0 else None,
            )
            for at, reward in enumerate(rewards)
        ]
        group = Group(prompt=Prompt(id=name, messages=[], fed_at=1.0), completions=completions, claimed_at=3.0)
        done = [TrainedCompletion("valid", 0.5, 3)] * len(completions)
        self.end(group, step, outcome, done=done, in_ledger=in_ledger)

    def bury(self, prompt: str) -> None:
        ledger = self.ledger()
        ledger.append_end(prompt, Dead("worker_lost"), 3, 2)
        ledger.sync()
        ledger.close()


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "run")
    made.sampled("a", 1, [1.0, 0.0])
    made.sampled("b", 2, [0.5, 0.5], Dropped("zero_variance"), version=2)
    made.sampled("lost", 3, [9.0], in_ledger=False)
    made.sampled("c", 3, [None, 0.25], version=3, text=HOSTILE)
    return made


def scanned_segments(monkeypatch) -> list[str]:
    """Return a list that gets the name of each segment that is scanned whole."""
    scanned, scan = [], ArchivedGroups._index
    monkeypatch.setattr(ArchivedGroups, "_index", lambda self, path: (scanned.append(path.name), scan(self, path)))
    return scanned


def found(index: GroupIndex, **query: str) -> list[str]:
    return [group.prompt for group in index.search(parse_filter(query), None, 99, 60).groups]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, "cba"),
        ({"step": "2.."}, "cb"),
        ({"version": "..1"}, "a"),
        ({"reward": "0.5..1"}, "ba"),
        ({"end": "invalid"}, "c"),
        ({"end": "reward:timeout"}, "c"),
        ({"end": "valid", "step": "3"}, "c"),
        ({"end": "length"}, "a"),
        ({"end": "truncated", "reward": "1"}, ""),
        ({"end": "dropped"}, "b"),
        ({"end": "dropped:zero_variance"}, "b"),
        ({"prompt": "script"}, "c"),
        ({"prompt": "b"}, "b"),
    ],
)
def test_groups_are_filtered_the_newest_first(run, query, names):
    assert found(GroupIndex(run.path), **query) == list(names)


def test_an_index_follows_a_run_that_goes_on_and_one_that_was_set_back(run):
    index = GroupIndex(run.path)
    assert found(index) == ["c", "b", "a"]
    run.sampled("d", 4, [1.0])
    assert index.refresh()
    assert found(index) == ["d", "c", "b", "a"]
    lines = (run.path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run.path / "ledger.jsonl").write_bytes(b"".join(lines[:1]))
    assert [index.refresh(), index.refresh()] == [False, False]
    assert found(index) == ["d", "c", "b", "a"]  # what is being read from it in a thread goes on
    new = GroupIndex(run.path)
    assert found(new) == ["a"]
    assert (new.groups.find("a"), new.groups.find("b")) == (0, None)


def test_a_page_of_the_newest_groups_reads_the_newest_segment_only(run, monkeypatch):
    scanned = scanned_segments(monkeypatch)
    index = GroupIndex(run.path)
    assert [group.prompt for group in index.search(CompletionFilter(), None, 1, 60).groups] == ["c"]
    assert scanned == ["000004.groups"]
    assert [group.prompt for group in index.search(CompletionFilter(), None, 2, 60).groups] == ["c", "b"]
    assert scanned == ["000004.groups", "000002.groups"]  # the other one begins with a later step


def test_a_group_of_the_oldest_step_is_found_without_a_scan_of_newer_segments(run, monkeypatch):
    scanned = scanned_segments(monkeypatch)
    groups = GroupIndex(run.path).groups
    group, _ = groups.read(groups.find("a"))
    assert (group.prompt.id, scanned) == ("a", ["000001.groups"])


def test_a_search_whose_time_is_up_goes_on_from_where_it_came_to(run):
    index = GroupIndex(run.path)
    index.refresh()
    first = index.search(CompletionFilter(), None, 2, 60)
    assert ([group.prompt for group in first.groups], first.is_interrupted) == (["c", "b"], False)
    rest = index.search(CompletionFilter(), first.next_before, 2, 60)
    assert ([group.prompt for group in rest.groups], rest.next_before) == (["a"], None)
    late = index.search(CompletionFilter(), None, 2, -1)
    assert (late.groups, late.next_before, late.is_interrupted) == ([], 3, True)


def test_a_group_that_the_archive_has_no_more_is_left_out_and_counted(run):
    (run.path / "groups" / "000002.groups").unlink()
    index = GroupIndex(run.path)
    assert found(index) == ["c", "a"]
    assert (len(index), index.unreadable, index.unread) == (3, 1, 0)


def test_every_bar_of_a_histogram_finds_as_many_completions_as_it_counts():
    values = [random.Random(3).gauss(0, 1) for _ in range(500)] + [0.25] * 40
    bars = histogram(values)
    assert sum(bar.count for bar in bars) == len(values)
    assert len(bars) <= 24
    for bar in bars:
        wanted = parse_filter({"reward": bar.reward_range}).rewards
        assert sum(value in wanted for value in values) == bar.count
    assert histogram([1.0, 0.0, 1.0]) == [Bar(0.0, 0.0, 1), Bar(1.0, 1.0, 2)]
    assert histogram([]) == []
    assert len(histogram([float(n) * 1e307 for n in range(-17, 18)])) <= 24


def long_completion(messages: int) -> Completion:
    call = {"id": "1", "function": {"name": "ring", "arguments": {"n": 1}}}
    return Completion(
        index=0,
        prompt_messages=[{"role": "user", "content": "Go."}],
        messages=[
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "till"},
            *({"role": "assistant", "content": f"Say {n}."} for n in range(messages - 2)),
        ],
        parts=[RewardPart(name="step", reward=Measured(0.5), turn=1), RewardPart(name="all", reward=Measured(1.0))],
        tool_runs=[ToolRun(0.25, True)],
        failure=Failure(reason=RolloutReason.ENV_STEP),
    )


def test_tool_results_have_name_and_duration_and_rewards_stand_at_the_turn_that_earned_them():
    shown = conversation(long_completion(3))
    assert [message.role for message in shown] == ["user", "assistant", "tool", "assistant"]
    assert (shown[1].calls, shown[1].rewards) == (["ring(n=1)"], [])
    assert (shown[2].tool, shown[2].seconds, shown[2].is_error) == ("ring", 0.25, True)
    assert (shown[3].turn, shown[3].rewards) == (2, ["step 0.5"])


@pytest.mark.parametrize("count", [2, FIRST + LAST, FIRST + LAST + 1, 200])
def test_of_a_long_conversation_the_first_and_last_messages_are_shown_and_none_is_shown_twice(count):
    messages = conversation(long_completion(count))
    first, omitted, last = visible_parts(messages)
    assert len(first) + omitted + len(last) == len(messages)
    assert [*first, *messages[len(first) : len(first) + omitted], *last] == messages
    assert len(first) + len(last) <= FIRST + LAST + 1


def letters(token_ids: bytes, start: int, end: int) -> str:
    return "abcdefgh"[start:end]


ANNOTATED = TrainedRow(
    loss_mask=b"\1\1\0\0",
    advantages=array("f", [1.0, -0.2, 0.0, 0.0]).tobytes(),
    logprob_differences=array("f", [0.06, -1.0, 0.0, math.nan]).tobytes(),
    rejected_by=b"\0\0\1\0",
    rules=("token_k1",),
)
ROW = Row(
    prompt_ids=b"",
    token_ids=array("i", [5, 6, 7, 8, 9]).tobytes(),
    sampled_ranges=[(0, 2), (3, 5)],
    logprobs=array("f", [-0.01, -1.0, -5.0, -2.0]).tobytes(),
    spans=[Span(7, 0, 2), Span(8, 3, 5)],
)


@pytest.mark.parametrize(
    ("color", "css", "meanings"),
    [
        ("advantage", ["tint-3", "shade-1", "context", "no-loss", "no-loss"], "up to +1: becomes more likely"),
        ("difference", ["tint-1", "shade-3", "context", "", "no-loss"], "trainer's log-prob higher by 1 nat or more"),
        ("mask", ["tint-2", "tint-2", "context", "shade-2 rejected", "no-loss"], "rejected by token_k1"),
        ("version", ["tint-1", "tint-1", "context", "shade-1", "shade-1"], "version 8"),
        ("logprob", ["", "shade-1", "context", "shade-3", "shade-2"], "below \u22120.5"),
    ],
)
def test_tokens_are_colored_by_what_is_recorded_of_them_and_a_legend_explains_it(color, css, meanings):
    page = token_page(ROW, 0, TrainedCompletion("valid", 0.4, 2, (ANNOTATED,)), letters, color, 0)
    assert [token.css for token in page.tokens] == css
    assert meanings in [entry.text for entry in page.legend]
    assert {entry.css for entry in page.legend} >= {"context"}
    assert page.note == ""


def test_a_tokens_tooltip_has_everything_that_is_recorded_of_it():
    done = TrainedCompletion("valid", 0.4, 2, (ANNOTATED,))
    titles = [token.title.split(" \u00b7 ") for token in token_page(ROW, 0, done, letters, "mask", 0).tokens]
    assert titles[0] == [
        *("'a'", "token 0, id 5", "engine's log-prob -0.010", "trainer's +0.060", "advantage +1", "version 7")
    ]
    assert titles[1][3:5] == ["trainer's -1.000", "advantage -0.2"]
    assert titles[2] == ["'c'", "token 2, id 7", "not sampled"]
    assert titles[3][3:] == ["trainer's +0.000", "no loss: rejected by token_k1", "version 8"]
    assert titles[4][2:] == ["engine's log-prob -2.000", "no loss", "version 8"]


def test_without_trained_tokens_a_page_says_what_it_does_not_know():
    done = TrainedCompletion("valid", 0.4, 2)
    page = token_page(ROW, 0, done, letters, "advantage", 3)
    assert [token.css for token in page.tokens] == ["tint-3", "tint-3"]
    assert "the mean advantage of its completion" in page.note
    assert (page.start, page.total, page.next_start) == (3, 5, None)
    failed = token_page(ROW, 0, TrainedCompletion("reward:timeout", None, 0), letters, "mask", 0)
    assert [entry.text for entry in failed.legend] == ["no loss: reward:timeout", "not sampled"]
    assert token_page(ROW, 0, None, letters, "difference", 0).note == ""


def test_the_choice_of_tokens_is_in_the_address():
    choice = TokenChoice.from_query({"tokens": "3,0,x,", "color": "mask", "row": "1"})
    assert (choice.color, choice.completions, choice.row) == ("mask", {0, 3}, 1)
    assert choice.query == {"tokens": "0,3", "color": "mask", "row": 1}
    assert TokenChoice.from_query({"color": "blue"}).query == {"tokens": "", "color": None, "row": None}


def way(group: Group, step: StepTimes | None = None) -> list[tuple[str, float, float]]:
    return [(phase.name, phase.began_at, phase.seconds) for phase in main_phases(GroupTimes.of_group(group), step)]


def timed_group(name: str, fed_at: float) -> Group:
    prompt = Prompt(id=name, messages=[], fed_at=fed_at)
    return Group(prompt=prompt, completions=[], claimed_at=fed_at + 1, rolled_out_at=fed_at + 3, scored_at=fed_at + 4)


def test_the_way_of_a_group_has_the_phases_whose_times_are_known():
    group = Group(prompt=Prompt(id="a", messages=[], fed_at=10.0), completions=[], claimed_at=12.0, rolled_out_at=20.0)
    assert way(group) == [("wait for a rollout worker", 10.0, 2.0), ("rollout", 12.0, 8.0)]
    group.scored_at = 23.0
    assert way(group)[2:] == [("score", 20.0, 3.0)]  # it is not known when a scorer claimed it
    group.score_claimed_at = 22.0
    assert way(group)[2:] == [("wait for a scorer", 20.0, 2.0), ("score", 22.0, 1.0)]
    step = StepTimes(number=3, began_at=25.0, ended_at=30.0, publish_began_at=29.0, publish_ended_at=31.0)
    assert way(group, step)[4:] == [("wait for the trainer", 23.0, 2.0), ("train", 25.0, 5.0), ("publish", 29.0, 2.0)]


def test_phases_are_bars_on_an_axis_which_cuts_off_what_came_before_it():
    phases = main_phases(GroupTimes(10.0, 20.0, 30.0))
    assert [(bar.number, bar.left, bar.width) for bar in Axis.of_phases(phases).bars(phases)] == [
        (0, 0.0, 50.0),
        (1, 50.0, 50.0),
    ]
    assert [(bar.number, bar.left, bar.width) for bar in Axis(start=20.0, end=40.0).bars(phases)] == [(1, 0.0, 50.0)]


@pytest.mark.parametrize(
    ("seconds", "ticks"),
    [
        (39.0, [(0.0, 0.0), (10.0, 25.641), (20.0, 51.282), (30.0, 76.923)]),
        (0.5, [(0.0, 0.0), (0.1, 20.0), (0.2, 40.0), (0.3, 60.0), (0.4, 80.0), (0.5, 100.0)]),
        (7200.0, [(0.0, 0.0), (2000.0, 27.778), (4000.0, 55.556), (6000.0, 83.333)]),
    ],
)
def test_an_axis_has_a_few_round_ticks(seconds, ticks):
    assert [(pytest.approx(at), left) for at, left in Axis(start=0.0, end=seconds).ticks] == ticks


def test_a_prompt_is_shown_as_the_model_saw_it_without_the_middle_of_a_long_one():
    def row(count: int) -> Row:
        return Row(prompt_ids=array("i", range(count)).tobytes(), token_ids=b"", spans=[], logprobs=b"")

    def decode(token_ids: bytes, start: int, end: int) -> list[str]:
        return [f"<{token}>" for token in memoryview(token_ids).cast("i")[start:end]]

    assert prompt_text(row(3), decode) == "<0><1><2>"
    text = prompt_text(row(4003), decode)
    assert "<1999>\n\n… 3 tokens are left out …\n\n<2003>" in text
    assert text.endswith("<4002>")


def test_lanes_of_a_timeline_share_an_axis_and_end_with_the_step_that_trained_their_group():
    trained = summarize_group(0, "trained", 3, timed_group("a", 1.0))
    dropped = summarize_group(1, "dropped:zero_variance", 3, timed_group("b", 2.0))
    axis, (first, second) = lanes([trained, dropped], {3: StepTimes(number=3, began_at=10.0, ended_at=12.0)})
    assert (axis.start, axis.end) == (2.0, 12.0)
    assert [bar.phase.name for bar in first.bars] == ["rollout", "score", "wait for the trainer", "train"]
    assert [bar.phase.name for bar in second.bars] == ["wait for a rollout worker", "rollout", "score"]
    assert first.bars[-1].left + first.bars[-1].width == 100.0
    assert lanes([summarize_group(0, "trained", 1, Group(prompt=Prompt(id="c", messages=[]), completions=[]))], {}) == (
        None,
        [],
    )


async def test_pages_of_groups_keep_their_filters_and_show_hostile_text_as_text(run):
    async with browser(run.path) as session:
        page = await text_of(session, "/runs/run/groups?end=invalid&step=..9")
        assert 'name="end" list="ends" value="invalid"' in page
        assert 'name="step" value="..9"' in page
        assert "/runs/run/groups?step=..9&amp;end=reward%3Atimeout" in page
        assert r"&lt;script&gt;alert(1)&lt;/script&gt;\u202eevil\x1b[31m" in page
        assert HOSTILE[:8] not in page
        group = await text_of(session, "/runs/run/group?id=c")
        assert "unmeasured (timeout)" in group
        assert "the reward is unmeasured (timeout): judge: 5 s" in group
        assert r"\u202eevil\x1b[31m" in group
        assert "<script>alert" not in group
        dropped = await text_of(session, "/runs/run/group?id=b")
        assert "All valid completions have the same reward, so none is better than another" in dropped
        assert "write a number or a range" in await text_of(session, "/runs/run/groups?reward=high")
        tokens = await text_of(session, "/runs/run/group?id=c&tokens=1&color=mask")
        assert tokens.count("does not exist here") == 1
        assert "/runs/run/group?id=c&amp;tokens=1%2C0&amp;color=mask#tokens-0" in tokens
        assert "does not exist here" in await text_of(session, "/runs/run/group/tokens?id=c&completion=0")
        assert "I say 0." in await text_of(session, "/runs/run/group/message?id=c&completion=0&message=1")
        await text_of(session, "/runs/run/group?id=none", 404)
        await anyio.to_thread.run_sync(run.bury, "bad")
        assert "Prompt bad is a dead letter (worker_lost)." in await text_of(session, "/runs/run/group?id=bad", 404)
        assert "groups without an outcome are on the server only" in await text_of(
            session, "/runs/run/groups?at=trainer"
        )


async def test_evaluations_are_listed_and_their_conversations_open(run):
    folder = run.path
    prompt = Prompt(id="held:0", messages=[{"role": "user", "content": HOSTILE}])
    done = Completion(index=0, messages=[{"role": "assistant", "content": "I say 4."}], reward=Measured(0.5), turns=1)
    (folder / "eval.jsonl").write_bytes(b"".join(encode_json(evaluation(n, 0.25)) + b"\n" for n in (0, 7)))
    await anyio.to_thread.run_sync(write_groups, folder, 7, [encode(Group(prompt=prompt, completions=[done]))])
    async with browser(folder) as session:
        address = f"/runs/{folder.name}"
        page = await text_of(session, f"{address}/evaluations")
        assert f'href="{address}/evaluations?step=7"' in page
        assert f'href="{address}/evaluations?step=0"' not in page  # it has no groups
        assert f'href="{address}/group?id=evaluation-7%2Fheld%3A0"' in page
        group = await text_of(session, f"{address}/group?id=evaluation-7%2Fheld%3A0")
        assert "evaluation of step 7" in group
        assert "I say 4." in group
        assert "<script>alert" not in group
        await text_of(session, f"{address}/group?id=evaluation-7%2Fheld%3A1", 404)
        await text_of(session, f"{address}/group?id=evaluation-8%2Fheld%3A0", 404)
