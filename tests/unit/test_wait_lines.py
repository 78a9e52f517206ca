"""The terminal names the user code that a run waits for, a few times."""

import time

from envs.call.call_memory import RunningCall
from stream.queue.in_flight import CompletionInFlight, GroupInFlight
from workers.launch.wait_lines import WaitLines


def call(text: str, seconds: float) -> tuple[str, RunningCall]:
    return "rollout-0", RunningCall(time.monotonic() - seconds, 7, text)


def resetting(seconds: float) -> GroupInFlight:
    since = time.time() - seconds
    completion = CompletionInFlight(index=0, turn=0, activity="reset", detail="", since=since, engine="", versions=[])
    return GroupInFlight(
        entry="1-0",
        prompt="d:0:4",
        claimed_at=since,
        worker="rollout-h-1-a",
        environment="slow",
        completions=[completion],
    )


def test_a_call_that_lasts_is_reported_after_ten_seconds_and_then_ever_more_rarely():
    lines, reported = WaitLines(), []
    for seconds in range(3600):
        reported += [
            seconds for _ in lines.observe([call("environment slow, prompt d:0:4 (Slow.reset)", seconds + 0.5)])
        ]
    assert reported == [10, 30, 90, 270, 810]


def test_the_report_names_environment_method_process_and_prompt():
    lines = WaitLines()
    (wait,) = lines.observe([call("environment slow, prompt d:0:4 (Slow.reset)", 12.0)])
    assert wait.text == "environment slow (Slow.reset) has not returned for 12 s (rollout-0, prompt d:0:4)"
    assert lines.longest == f"; {wait.text}"
    (wait,) = lines.observe([call("environment slow, its module and constructor", 12.0)])
    assert wait.text.startswith("environment slow, its module and constructor has not returned for 12 s (rollout-0)")


def test_a_reset_that_awaits_is_reported_and_one_in_a_thread_only_once():
    assert [wait.call for wait in WaitLines().observe([], [resetting(11.0)])] == ["environment slow (reset)"]
    both = WaitLines().observe([call("environment slow, prompt d:0:4 (Slow.reset)", 11.0)], [resetting(11.0)])
    assert [wait.call for wait in both] == ["environment slow (Slow.reset)"]


def test_many_prompts_that_wait_for_the_same_are_one_report():
    lines = WaitLines()
    calls = [call(f"environment slow, prompt d:0:{i} (Slow.reset)", 11.0) for i in range(64)]
    assert len(lines.observe(calls)) == 1
    assert lines.observe(calls) == []


def test_an_environment_with_a_loop_of_its_own_takes_its_time():
    assert WaitLines().observe([call("environment agent, prompt d:0:4 (Agent.run_episode)", 500.0)]) == []
