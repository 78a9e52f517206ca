"""What the trainer counts and commits for one step, by the learner's report."""

from types import SimpleNamespace

import pytest

from stream.records import Group, Prompt
from stream.validity import DropReason
from workers.settings.toml_file import parse_settings
from workers.train import trainer as trainer_module
from workers.train.groups.collector import CollectedBatch
from workers.train.progress import Progress
from workers.train.step.metrics import StepReport
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
        return {}, []

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
