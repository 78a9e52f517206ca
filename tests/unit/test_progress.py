"""The progress display of a run, from made-up statuses."""

import io

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from stream.operator.status import RunStatus, StageStatus
from workers.launch.restarts import MAX_RESTARTS, GiveUp, Restart, RestartPolicy
from workers.launch.watch import StallDetector
from workers.role.exit_codes import ExitCode
from workers.runs.metrics_file import metric_value
from workers.settings import QueueSettings
from workers.terminal.progress import (
    LineDisplay,
    SupervisorState,
    TableDisplay,
    describe_scale,
    format_line,
    render_table,
    sparkline,
)

METRICS = {
    "reward/mean": 0.75,
    "correction/k3_kl": 0.00125,
    "valid_fraction": 0.98,
    "staleness/mean": 0.5,
    "tokens_per_second": 1234.5,
}


def stage(**fields) -> StageStatus:
    zeros = {"depth": 0, "claimed": 0, "delayed": 0, "marked": 0, "lag": 0, "oldest_age_ms": 0.0, "rate": 0.0}
    return StageStatus(**(zeros | {"consumers": {}} | fields))


def run_status(metrics=None, *, counts=None, feed=None, is_open=0, scored=None) -> RunStatus:
    return RunStatus(
        now_ms=0,
        stages={
            "prompts": stage(depth=5, claimed=2, lag=3, consumers={"rollout-1": 2}),
            "groups": stage(),
            "scored": scored or stage(),
        },
        unfinished=is_open,
        outstanding=0,
        dead=0,
        counts=counts or {},
        feed=feed or {},
        policy={"version": "4", "step": "3"},
        latest=msgspec.json.encode(metrics).decode() if metrics else "",
    )


def drawn(picture) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(picture)
    return console.file.getvalue()


RUNNING = SupervisorState(run="demo", phase="running", seconds=61)
PAUSED = {"paused": "ann@box", "paused_ms": "1767323045678"}


def test_a_progress_line_has_only_known_values():
    line = format_line(run_status(METRICS, counts={"fed": 9, "trained": 4, "dropped:operator": 1}, is_open=4), RUNNING)
    assert line == (
        "demo 1 min 01 s | running | step 3 | version 4 | reward 0.750 | off-policy KL 0.0013 | valid 98.0% | "
        "staleness 0.50 | tokens/s 1,234 | prompts 5 groups 0 scored 0 | trained 4 dropped 1 dead 0 outstanding 4 fed 9"
    )
    assert "reward" not in format_line(run_status(), RUNNING)


def test_a_first_progress_line_has_only_the_phase():
    assert (
        format_line(None, SupervisorState(run="demo", phase="starting the engine"))
        == "demo 0.0 s | starting the engine"
    )
    assert "starting" in drawn(render_table(None, SupervisorState(run="demo", phase="starting"), {}))


def test_the_screen_fits_80_columns_and_shows_the_balance():
    counts = {"fed": 90, "trained": 40, "dropped:zero_variance": 10}
    screen = drawn(
        render_table(
            run_status(METRICS, counts=counts, feed={"total": "100"}, is_open=40), RUNNING, {7: 0.1, 8: 0.5, 9: 0.75}
        )
    )
    assert "50 of 100 prompts  50%" in screen
    assert "reward 0.750  ▁▅█  0.1 to 0.75, steps 7 to 9" in screen
    assert "fed 90 = trained 40 + dropped 10 + dead 0 + outstanding 40" in screen
    assert "dropped: zero_variance 10" in screen
    assert all(len(row.rstrip()) <= 80 for row in screen.splitlines())


def test_without_a_known_total_there_is_no_bar():
    assert "prompts  " not in drawn(render_table(run_status(METRICS), RUNNING, {})).split("stage")[0]


def test_restarts_are_shown():
    state = SupervisorState(run="demo", phase="running", restarts={"rollout-1": 2})
    assert "restarts rollout-1 2" in format_line(run_status(), state)
    assert "rollout-1 2x" in drawn(render_table(run_status(), state, {}))


def test_trained_groups_that_wait_for_a_checkpoint_are_not_shown_as_queued():
    assert "scored 1 " in format_line(run_status(scored=stage(depth=9, marked=8)), RUNNING)


def test_lines_are_printed_every_ten_seconds_and_at_every_new_phase(capsys):
    lines = LineDisplay(every_s=10)
    for phase in ("running", "running", "draining"):
        lines.show(run_status(), SupervisorState(run="demo", phase=phase))
    output = capsys.readouterr()
    assert [text.split(" | ")[1] for text in output.err.splitlines()] == ["running", "draining"]
    assert output.out == ""


def test_the_screen_shows_the_reward_of_each_step():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with TableDisplay(console) as screen:
        screen.show(run_status({"reward/mean": 0.1}), RUNNING)
        screen.show(run_status({"reward/mean": 0.1}), RUNNING)
        assert "▁" not in console.file.getvalue()
        later = run_status({"reward/mean": 0.9})
        later.policy["step"] = "4"
        screen.show(later, RUNNING)
    assert "▁█" in console.file.getvalue()


def test_a_sampled_completion_is_printed_above_the_table_or_as_plain_lines(capsys):
    lines = [Text("── sample ──", "bold"), Text("assistant  [bold]4[/]\\x1b")]
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with TableDisplay(console) as screen:
        screen.show(run_status(METRICS), RUNNING)
        screen.print_lines(lines)
        screen.show(run_status(METRICS), RUNNING)
        assert screen.width == 80
    text = console.file.getvalue()
    assert "assistant  [bold]4[/]\\x1b\n" in text
    assert text.rindex("sample") < text.rindex("0.750")
    LineDisplay().print_lines(lines)
    assert capsys.readouterr().err == "── sample ──\nassistant  [bold]4[/]\\x1b\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.5"])
def test_missing_numbers_are_not_shown(value):
    assert metric_value({"reward/mean": value}, "reward") is None


def test_the_displayed_reward_is_over_all_sampled_groups():
    assert metric_value({"trained/reward_mean": 0.2, "reward/mean": 0.6}, "reward") == 0.6
    assert metric_value({"reward_mean": 0.2}, "reward") == 0.2


def test_equal_values_give_a_flat_sparkline():
    assert sparkline([0.5, 0.5]) == "▁▁"
    assert describe_scale({1: 0.5, 2: 0.5}) == "all 0.5, steps 1 to 2"


def test_the_longest_sparkline_fits_80_columns():
    rewards = {step: 1 / step for step in range(99_976, 100_000)}
    screen = drawn(render_table(run_status(METRICS), RUNNING, rewards))
    assert "steps 99976 to 99999\n" in "\n".join(row.rstrip() for row in screen.splitlines()) + "\n"


def test_a_process_is_restarted_within_its_budget_which_refills_after_the_window():
    restarts = RestartPolicy(QueueSettings(lease_s=30.0))
    assert 0.5 <= restarts.decide(-9, 100, now=0).delay_s <= 1.0
    assert 1.0 <= restarts.decide(-9, 100, now=1).delay_s <= 2.0
    assert all(isinstance(restarts.decide(-9, 100, now=2), Restart) for _ in range(3))
    assert "restarted 5 times within 10 minutes" in restarts.decide(-9, 100, now=3).reason
    assert isinstance(restarts.decide(-9, 100, now=601), Restart)


def test_three_quick_exits_in_a_row_are_a_crash_loop():
    restarts = RestartPolicy(QueueSettings())
    for lived_s in (1, 1, 60, 1, 1):
        assert isinstance(restarts.decide(1, lived_s, now=0), Restart)
    assert "3 times in a row" in restarts.decide(1, 1, now=0).reason


def test_kills_are_not_a_crash_loop():
    restarts = RestartPolicy(QueueSettings())
    assert all(isinstance(restarts.decide(-9, 0.1, now=0), Restart) for _ in range(5))


@pytest.mark.parametrize("code", [ExitCode.USAGE, ExitCode.PERMANENT])
def test_a_process_with_a_permanent_error_is_not_restarted(code):
    assert isinstance(RestartPolicy(QueueSettings()).decide(code, 100, now=0), GiveUp)


def test_recycling_does_not_use_the_restart_budget():
    policy = RestartPolicy(QueueSettings())
    assert all(policy.decide(ExitCode.RECYCLE, 100, now=0) == Restart(0.0) for _ in range(2 * MAX_RESTARTS))
    assert all(isinstance(policy.decide(1, 100, now=0), Restart) for _ in range(MAX_RESTARTS))
    assert isinstance(policy.decide(1, 100, now=0), GiveUp)


def test_a_stall_is_detected_only_if_no_work_ends_while_there_is_some():
    alarm = StallDetector(10, now=0)
    assert not alarm.observe(run_status(counts={"trained": 1}, is_open=3), now=9)
    assert not alarm.observe(run_status(counts={"trained": 2}, is_open=3), now=18)
    message = alarm.observe(run_status(counts={"trained": 2}, is_open=3, feed={"done": "1"}), now=28)
    assert message.startswith(
        "nothing was trained or dropped for 10 s (abort.stall_timeout_s), while 3 prompts are unfinished: prompts"
    )
    assert "prompts has 3 waiting, 2 claimed by rollout-1 2, 0 delayed" in message


def test_a_run_without_work_is_not_stalled():
    alarm = StallDetector(10, now=0)
    assert not alarm.observe(run_status(feed={"done": "1"}), now=1000)
    assert alarm.observe(run_status(feed={}), now=1010), "a feeder that has not fed everything is work"


def test_a_paused_run_is_not_stalled_and_resuming_resets_the_timeout():
    alarm, paused, going = StallDetector(10, now=0), run_status(is_open=3), run_status(is_open=3)
    paused.meta |= PAUSED
    assert not alarm.observe(going, now=9)
    assert not alarm.observe(paused, now=1000)
    assert not alarm.observe(going, now=1009)
    assert alarm.observe(going, now=1010)


def test_a_pause_is_shown_immediately_in_every_display(capsys):
    paused, lines = run_status(), LineDisplay()
    paused.meta |= PAUSED
    lines.show(run_status(), RUNNING)
    lines.show(paused, RUNNING)
    lines.show(paused, RUNNING)
    first, second = capsys.readouterr().err.splitlines()
    expected = "paused by ann@box since 2026-01-02 03:04:05 UTC"
    assert expected not in first
    assert f"demo 1 min 01 s | running | {expected} | step 3" in second
    assert expected in drawn(render_table(paused, RUNNING, {}))


def test_a_run_that_never_begins_is_stalled():
    alarm = StallDetector(10, now=0)
    assert not alarm.observe(None, now=9)
    assert alarm.observe(None, now=10) == "the run had not begun after 10 s"
