"""What the trainer counts and commits for one step, by the learner's report."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import anyio
import pytest

from stream.errors import RunFailedError
from stream.records import Group, Prompt
from stream.validity import DropReason
from workers.runs.progress import Progress
from workers.settings.toml_file import parse_settings
from workers.train import trainer as trainer_module
from workers.train.groups.collector import CollectedBatch
from workers.train.groups.group_checker import DroppedGroups
from workers.train.step.step_metrics import StepReport
from workers.train.trainer import Trainer
from workers.train.training_warnings import TrainingWarnings

SETTINGS = parse_settings({"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "r:f"}]})


class Consumer:
    """Two leased groups; remembers what was committed."""

    version = 3

    def pop(self, ids):
        return [SimpleNamespace(group=Group(prompt=Prompt(id=name, messages=[]), completions=[])) for name in ids]

    async def commit(self, leased, step, reasons, completions):
        self.committed = ([each.group.prompt.id for each in leased], step, reasons, completions)


class Collector:
    """Has nothing to report but its consumer."""

    def __init__(self, consumer) -> None:
        self.consumer = consumer
        self.warnings = TrainingWarnings(SETTINGS)

    def pop_dropped(self):
        return DroppedGroups({DropReason.NO_VALID_ROW: 2}, [], Counter({"rows/reward:missing": 3, "rows/valid": 1}))

    def pop_logged(self):
        return {}

    def observe_step(self, *_) -> None:
        """Ignore what the step measured."""

    async def report_warnings(self) -> None:
        """Report nothing."""


class Evaluation:
    async def end_if_complete(self) -> None:
        """No evaluation runs."""

    def pop_metrics(self):
        return {}


@pytest.mark.parametrize(
    ("trained", "skipped", "dropped", "reasons", "counted"),
    [
        (True, "", {}, {}, 2),
        (True, "", {"b": DropReason.NO_VALID_ROW}, {"b": "no_valid_row"}, 1),
        (False, "gradient_not_finite", {}, {"a": "gradient_not_finite", "b": "gradient_not_finite"}, 0),
    ],
)
async def test_groups_that_were_not_trained_on_are_dropped_and_not_counted(
    monkeypatch, trained, skipped, dropped, reasons, counted
):
    report = StepReport(trained=trained, skipped=skipped, dropped=dropped, loss=0.0, metrics={}, completions={"a": []})
    monkeypatch.setattr(trainer_module, "_train_step", lambda *_: report)
    consumer, progress = Consumer(), Progress()
    collector = Collector(consumer)
    log = SimpleNamespace(append=lambda _metrics: None)
    trainer = Trainer(SETTINGS, collector, None, None, None, Evaluation(), log, progress)
    await trainer._step(0.0, CollectedBatch(["a", "b"]))
    assert consumer.committed == (["a", "b"], 1, reasons, {"a": []})
    assert (progress.groups, progress.step) == (counted, 1)


async def test_completions_of_groups_that_were_dropped_on_the_way_count_in_every_figure_of_validity(monkeypatch):
    metrics = {"rows/valid": 6, "rows/failed:engine": 2, "valid_fraction": 0.75}
    report = StepReport(trained=True, skipped="", dropped={}, loss=0.0, metrics=metrics, completions={})
    monkeypatch.setattr(trainer_module, "_train_step", lambda *_: report)
    progress, logged = Progress(), []
    log = SimpleNamespace(append=logged.append)
    trainer = Trainer(SETTINGS, Collector(Consumer()), None, None, None, Evaluation(), log, progress)
    await trainer._step(0.0, CollectedBatch(["a", "b"]))
    rows = {name: value for name, value in logged[0].items() if name.startswith(("rows/", "valid"))}
    assert rows == {"rows/valid": 7, "rows/failed:engine": 2, "rows/reward:missing": 3, "valid_fraction": 7 / 12}
    assert progress.completion_states == {"valid": 6, "failed:engine": 2}, "the dropped ones counted when they came"


class Publications:
    """Publishes the first version at once, later ones when `proceed` is set; these fail with `error`."""

    def __init__(self, consumer, events, error) -> None:
        self.consumer, self.events, self.error = consumer, events, error
        self.proceed = anyio.Event()
        self.first = consumer.version + 1

    async def reserve(self):
        self.consumer.version += 1
        return self.consumer.version

    async def publish(self, version, write, step, metrics):
        self.events.append(f"publish {version}")
        if version > self.first:
            await self.proceed.wait()
            if self.error:
                raise self.error
        self.events.append(f"published {version} with {write('folder')}")


class Learner:
    steps = 0
    """Steps trained."""

    def copy_weights(self):
        steps = self.steps
        return lambda _folder: f"{steps} steps"


class Run:
    """A trainer of a run of three steps; a moment after the second was committed, publications may proceed."""

    def __init__(self, monkeypatch, error=None) -> None:
        self.events, self.stops_at = [], 0
        self.consumer = Consumer()
        self.publications = Publications(self.consumer, self.events, error)
        learner, batches = Learner(), iter((True, True, False))

        def train(_learner, leased, version, *_):
            learner.steps += 1
            self.events.append(f"train {learner.steps} at version {version}")
            return StepReport(trained=True, skipped="", dropped={}, loss=0.0, metrics={}, completions={})

        async def collect(_steps_left, is_publishing):
            self.events.append(f"collect, publishing: {is_publishing()}")
            return CollectedBatch(["a", "b"], has_more=next(batches))

        async def nothing(*_):
            """Succeed."""

        async def evaluate_final(version, step):
            self.events.append(f"evaluate version {version}, {step} steps")

        async def finish(reason):
            self.events.append(f"finish: {reason}")

        async def commit(_leased, step, *_):
            self.events.append(f"commit {step}")
            if step == self.stops_at:
                self.consumer.connection.stopping.set()
            if step == 2:
                asyncio.get_running_loop().call_later(0.05, self.publications.proceed.set)

        monkeypatch.setattr(trainer_module, "_train_step", train)
        collector, evaluation = Collector(self.consumer), Evaluation()
        collector.collect, collector.prefetch = collect, nothing
        for name in ("discard_unfinished", "wait_until_sampled", "begin_if_due"):
            setattr(evaluation, name, nothing)
        evaluation.evaluate_final = evaluate_final
        evaluation.is_final_due = lambda _step: False
        self.consumer.connection = SimpleNamespace(stopping=anyio.Event())
        self.consumer.commit, self.consumer.checkpoint, self.consumer.finish = commit, nothing, finish
        self.consumer.release_all = nothing
        log = SimpleNamespace(append=lambda _metrics: None)
        self.trainer = Trainer(SETTINGS, collector, learner, None, self.publications, evaluation, log, Progress())


async def test_a_version_is_published_while_the_next_step_trains_and_before_that_step_ends(monkeypatch):
    """Version 5 is published with the weights of step 1, though step 2 has trained by then."""
    run = Run(monkeypatch)
    with anyio.fail_after(5):
        await run.trainer.run()
    assert run.events[:6] == [
        *("publish 4", "published 4 with 0 steps"),
        *("collect, publishing: False", "train 1 at version 4", "commit 1"),
        "collect, publishing: True",
    ]
    assert run.events[6:8] == ["publish 5", "train 2 at version 5"]
    assert run.events[8:10] == ["commit 2", "published 5 with 1 steps"]
    assert run.events[10] == "collect, publishing: True"  # of version 6
    assert run.events[-3:] == [*("published 7 with 3 steps", "evaluate version 7, 3 steps", "finish: trained 3 steps")]


async def test_a_trainer_that_is_asked_to_stop_evaluates_and_finishes_nothing(monkeypatch):
    run = Run(monkeypatch)
    run.stops_at = 2
    with anyio.fail_after(5):
        await run.trainer.run()
    assert "commit 2" in run.events
    assert not [event for event in run.events if event.startswith(("commit 3", "evaluate", "finish"))]


async def test_a_failed_publication_ends_the_run_at_the_next_step(monkeypatch):
    run = Run(monkeypatch, RunFailedError("every engine refuses"))
    with anyio.fail_after(5), pytest.RaisesGroup(pytest.RaisesExc(RunFailedError, match="every engine refuses")):
        await run.trainer.run()
    trained = [event for event in run.events if event.startswith("train")]
    assert trained == ["train 1 at version 4", "train 2 at version 5"]
