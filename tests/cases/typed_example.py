"""Everything of the face, as a user with a type checker writes it."""

from pathlib import Path
from typing import Any, assert_type

import penstock
from penstock.testing import Call, EpisodeResult, call, play
from penstock.trainer import Feed, ResumePoint, RunConnection, connect, consume


class Counter:
    """An environment."""

    def __init__(self) -> None:
        self.total = 0

    def reset(self, target: int, **row: object) -> str:
        """Begin."""
        if target > 100:
            raise penstock.EnvironmentFailure("the target is out of range")
        self.target = target
        return f"Count to {target}."

    def add(self, amount: int) -> str:
        """Add to the total."""
        self.total += amount
        return str(self.total)

    def get_reward(self) -> float:
        return float(self.total == self.target)


class Asker(penstock.AgentEnvironment):
    """An environment with a loop of its own."""

    def reset(self, **row: object) -> None:
        """Begin."""

    async def run_episode(self, endpoint: str, sampling: dict[str, Any]) -> None:
        """Ask nothing."""


def make() -> list[penstock.Environment]:
    return [Counter(), Asker()]


def length(completions: list[str], **columns: object) -> list[float]:
    return [float(len(text)) for text in completions]


def look(group: penstock.Group) -> list[float]:
    values = []
    for completion in group.completions:
        assert_type(completion, penstock.Completion)
        reward = completion.reward
        if isinstance(reward, penstock.Measured):
            values.append(reward.value)
        elif isinstance(reward, penstock.Unmeasured):
            print(reward.reason, reward.detail)
    assert_type(group.prompt, penstock.Prompt)
    return values


def use() -> None:
    report = penstock.check("counter.py:Counter", fields={"target": 3}, overrides={"rollout.max_turns": 3})
    assert_type(report, penstock.CheckReport)
    print(report.ok, report.errors[0].text)
    group = penstock.play({"ref": "counter.py:Counter"}, policy=Path("policy"), n=2, fields={"target": 3})
    print(look(group), penstock.__version__)
    settings = penstock.load_settings("run.toml", ("train.max_steps=3",))
    assert_type(settings, penstock.Settings)
    try:
        summary = penstock.run(settings, {"train.max_steps": 20}, quiet=True)
        assert_type(summary, penstock.RunSummary)
    except penstock.SettingsError as error:
        raise penstock.PenstockError("no run") from error
    run = penstock.open_run("runs/my-run")
    assert_type(run, penstock.Run)
    rows = run.metrics()
    print(rows[0]["step"], run.status().bottleneck, run.audit().clean, run.export("groups.parquet"))
    for found in run.groups(reward="..0.2", count=3):
        print(found.completions[0].reward)
    for view in run.completions(end=["failed"]):
        print(look(view.group))
    print(penstock.measure(1.0))


def test() -> None:
    turns: list[str | Call] = [call("add", amount=3), "done"]
    played = play(Counter, turns, fields={"target": 3}, rewards=[length])
    assert_type(played, EpisodeResult)
    assert played.reward_value == 4.0


async def feed_and_train(folder: Path) -> None:
    async with connect("redis://localhost", "run") as connection:
        assert_type(connection, RunConnection)
        feed = Feed(connection, max_queued_prompts=8)
        cursor = await feed.cursor()
        await feed.put([penstock.Prompt(id="a:0:0", messages=[])], cursor, "1")
        async with consume(
            connection, folder / "ledger.jsonl", ResumePoint(ledger_bytes=0, version=-1, step=0)
        ) as consumer:
            for leased in await consumer.claim(8) or ():
                look(leased.group)
