"""What limits a run, from made-up statuses: one situation after the other."""

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from stream.operator.bottleneck import Bottleneck, find_bottleneck
from stream.operator.status import RunStatus, StageStatus
from stream.queue.in_flight import Activity, CompletionInFlight, GroupInFlight
from workers.launch.watch import BottleneckLog

NOW_MS = 1_000_000.0
SWAPPING = {
    "h": '999000 {"host":"h","total":24000000000,"available":0,"swap_rate":5000000.0,'
    '"processes":[["engine-0",2000000000,0],["train-0",21000000000,1000000000]]}'
}
SWAPPED_EARLIER = {"h": SWAPPING["h"].replace("999", "9", 1)}
"""Reported nearly a thousand seconds ago."""
TRAINER = {"owner": "train-1", "owner_until": "1010000", "version": "3"}


def stage(depth: int = 0, claimed: int = 0, workers: int = 1, marked: int = 0, delayed: int = 0) -> StageStatus:
    consumers = {f"w{i}": claimed // workers for i in range(workers)} if claimed else {}
    return StageStatus(
        depth=depth, claimed=claimed, delayed=delayed, marked=marked, lag=depth - claimed, oldest_age_ms=0.0, rate=0.0,
        consumers=consumers,
    )  # fmt: skip


def status(prompts=None, groups=None, scored=None, *, unpublished: int = 0, **fields) -> RunStatus:
    """Return a status of a run with batches of 8 and room for 16 outstanding groups."""
    stages = {"prompts": prompts or stage(100), "groups": groups or stage(), "scored": scored or stage()}
    outstanding = stages["prompts"].claimed + stages["groups"].depth + stages["scored"].depth
    outstanding += unpublished - stages["scored"].marked
    facts = {
        "now_ms": NOW_MS, "stages": stages, "unfinished": 100, "outstanding": outstanding, "dead": 0,
        "counts": {"fed": 120}, "meta": {"capacity": "16", "batch_size": "8"}, "policy": TRAINER,
    }  # fmt: skip
    return RunStatus(**(facts | fields))


def doing(activity: str, completions: int = 4, environment: str = "", stage: str = "prompts") -> GroupInFlight:
    each = [
        CompletionInFlight(index=i, turn=0, activity=activity, detail="", since=0.0, engine="", versions=[])
        for i in range(completions)
    ]
    return GroupInFlight(
        entry="1-0", prompt="p", claimed_at=0.0, stage=stage, environment=environment, total=4, completions=each
    )


@pytest.mark.parametrize(
    ("seen", "groups", "limit"),
    [
        (status(meta={"finished": "trained 3 steps"}), [], "finished"),
        (status(meta={"paused": "anna", "paused_ms": "1000"}), [], "paused"),
        # A machine that swaps slows down whatever else would limit the run.
        (status(stage(100, 4), scored=stage(12, 12), memory=SWAPPING), [], "memory"),
        (status(stage(100, 4), scored=stage(12, 12), memory=SWAPPED_EARLIER), [], "trainer"),
        # Most groups are in front of the trainer, and a batch is complete.
        (status(stage(100, 4), scored=stage(12, 12)), [], "trainer"),
        (status(stage(100, 4), scored=stage(4), unpublished=8), [], "trainer"),
        # Marked entries wait for a checkpoint only; eight groups are no longer the trainer's.
        (status(stage(100, 6), scored=stage(14, marked=8)), [doing(Activity.ENGINE_WAIT)], "engines"),
        # A batch is not complete: the trainer waits for the last two groups, which hang in a tool.
        (status(stage(100, 2), scored=stage(7), meta={"capacity": "9", "batch_size": "8"}),
         [doing(Activity.TOOL, environment="shell")], "environment"),
        # Half of the groups are in the step that runs; the trainer never waited in the last one.
        (status(stage(100, 8), scored=stage(8), latest='{"seconds": 9.8, "step_seconds": 10.0}'), [], "trainer"),
        (status(stage(100, 8), scored=stage(8), latest='{"seconds": 2.0, "step_seconds": 10.0}'),
         [doing(Activity.SAMPLING)], "engines"),
        (status(stage(100, 2), scored=stage(9), policy={}), [], "trainer"),
        (status(stage(100, 2), scored=stage(9), policy=TRAINER | {"owner_until": "999999"}), [], "trainer"),
        (status(stage(100, 4), stage(12, 2)), [], "scorers"),
        (status(stage(100, 4), stage(12, 0)), [], "scorers"),
        (status(stage(100, 0)), [], "rollout workers"),
        (status(stage(100, 16)), [doing(Activity.SAMPLING, 3), doing(Activity.ENGINE_WAIT, 1)], "engines"),
        (status(stage(100, 16)), [doing(Activity.SAMPLING)], "engines"),
        # The workers hold as many groups as they may, and no engine is full.
        (status(stage(100, 4)), [doing(Activity.SAMPLING)], "rollout workers"),
        (status(stage(100, 4)), [], "rollout workers"),
        (status(stage(100, 4)), [doing(Activity.TOOL, 3, "shell"), doing(Activity.SAMPLING, 1)], "environment"),
        (status(stage(100, 4)), [doing(Activity.REWARD, 3, "shell")], "environment"),
        (status(stage(100, 4)), [structs.replace(doing("", 0), activity="reward")], "rewards"),
        # What an evaluation does is not what limits the run.
        (status(stage(100, 4)), [doing(Activity.TOOL, stage="eval:prompts"), doing(Activity.SAMPLING)],
         "rollout workers"),
        (status(stage(100, 4)), [doing("an activity of a newer worker")], "rollout workers"),
        (status(stage(3, 3), feed={"done": "1"}), [doing(Activity.TOOL)], "prompts"),
        (status(stage(0), feed={"total": "500"}), [], "prompts"),
    ],
)  # fmt: skip
def test_each_situation_has_its_limit(seen, groups, limit):
    found = find_bottleneck(seen, groups)
    assert found.limit == limit
    assert found.why
    assert found.figures["outstanding"] == seen.outstanding


@pytest.mark.parametrize(
    ("seen", "groups", "text"),
    [
        (status(stage(100, 4), scored=stage(12, 12), latest='{"seconds": 9.5, "step_seconds": 10}'), [],
         "limited by trainer: 12 groups scored, 8 in a batch; it computed for 95% of its last step"),
        (status(stage(100, 4), scored=stage(12), policy={}), [],
         "limited by trainer: 12 groups scored, and no trainer runs"),
        (status(stage(100, 1), stage(12, 4, workers=2)), [],
         "limited by scorers: 12 groups to score, 4 of them claimed by 2 workers"),
        (status(stage(100, 0, delayed=3)), [],
         "limited by rollout workers: 100 prompts to roll out, 3 of them for another attempt, and no worker holds one"),
        (status(stage(100, 4)), [doing(Activity.TOOL, 3, "shell"), doing(Activity.ENGINE_WAIT, 0)],
         "limited by environment shell: 4 groups at 1 rollout worker, 96 prompts waiting; of 3 completions: 3 tool"),
        (status(stage(3, 3), feed={"done": "1"}), [],
         "out of prompts: all 120 are fed and claimed, 100 without an outcome yet"),
        (status(stage(0), feed={"total": "500"}), [],
         "out of prompts: 120 of 500 are fed, and none waits: the feeder does not keep up"),
        (status(meta={"paused": "anna", "paused_ms": "1000"}), [], "paused by anna since 1970-01-01 00:00:01 UTC"),
    ],
)  # fmt: skip
def test_the_figures_are_named(seen, groups, text):
    assert str(find_bottleneck(seen, groups)) == text


def test_a_change_is_logged_once_it_lasts():
    bottlenecks = BottleneckLog()
    engines, trainer = (Bottleneck(limit=limit, why="why", figures={}) for limit in ("engines", "trainer"))
    with capture_logs() as logs:
        for _ in range(20):
            bottlenecks.observe(engines)
        for _ in range(5):  # the limits of a run take turns, from step to step
            for found in (trainer, engines, engines):
                bottlenecks.observe(found)
        for _ in range(40):
            bottlenecks.observe(trainer)
    assert [(each["event"], each["limit"]) for each in logs] == [
        ("bottleneck.changed", "engines"),
        ("bottleneck.changed", "trainer"),
    ]


def test_the_process_that_makes_a_machine_swap_is_named():
    found = find_bottleneck(status(memory=SWAPPING))
    assert str(found) == "limited by memory: train-0 holds 21.0 GB of 24.0 GB, the machine swaps"
    assert found.process == "train-0"
    assert found.figures["memory/engine-0"] == 2_000_000_000
