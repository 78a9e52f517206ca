"""Durations of the attempts that are trained, and of first attempts, including cancelled ones."""

from stream.records import Completion, Group, Prompt
from workers.train.groups.collector import StragglerWait
from workers.train.step.step_metrics import COLLECTION_METRICS
from workers.train.trainer import attempt_metrics

TOOLS = {"tools/calls": 0, "tools/errors": 0}


def group(seconds, *cancelled_s):
    prompt = Prompt(id="p", messages=[])
    return Group(
        prompt=prompt,
        completions=[],
        claimed_at=100.0,
        rolled_out_at=100.0 + seconds,
        cancelled_attempts_s=list(cancelled_s),
    )


def test_without_cancelled_attempts_both_durations_are_equal():
    result = attempt_metrics([group(1.0), group(3.0)])
    assert result == {"attempt/seconds": 2.0, "attempt/seconds_first": 2.0, "attempt/cancelled": 0} | TOOLS


def test_a_cancelled_first_attempt_counts_with_its_running_time():
    result = attempt_metrics([group(1.0), group(2.0, 5.0, 7.0)])
    assert result == {"attempt/seconds": 1.5, "attempt/seconds_first": 3.0, "attempt/cancelled": 2} | TOOLS


def test_tool_calls_of_all_completions_are_counted_with_their_errors():
    done = group(1.0)
    done.completions += [Completion(index=0, tool_calls=3, tool_errors=1), Completion(index=1, tool_calls=2)]
    counts = attempt_metrics([done, group(1.0)])
    assert (counts["tools/calls"], counts["tools/errors"]) == (5, 1)


def test_without_groups_there_are_no_metrics():
    assert attempt_metrics([]) == {}


def test_metrics_of_collected_batches_are_documented():
    names = attempt_metrics([group(1.0)]).keys() | StragglerWait(1.0).pop_metrics().keys()
    assert names == COLLECTION_METRICS.keys()
