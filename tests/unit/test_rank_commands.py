"""Rank commands arrive unchanged, and none is sent after one that failed."""

from dataclasses import fields, replace

import pytest
import torch

from tests.unit.test_learner import group
from workers.settings.toml_file import parse_settings
from workers.train.rank_control.commands import (
    CreateLearner,
    GatherState,
    GatherWeights,
    Heartbeat,
    RankCommands,
    RankLostError,
    Restore,
    Shutdown,
    TrainStep,
)
from workers.train.ranks import Ranks
from workers.train.step.batch import Batch, collate


class Overheard(Ranks):
    """Ranks whose broadcast messages the test records."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""

    def broadcast_bytes(self, message: bytes = b"") -> bytes:
        self.said = message or self.said
        return self.said


def passed_on(order):
    orders = RankCommands(Overheard())
    with orders.broadcast(order):
        pass
    return orders.receive()


def same(one: object, other: object) -> None:
    assert type(one) is type(other)
    for field in fields(one):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype, field.name
            assert ours.shape == theirs.shape, field.name
            assert torch.equal(ours, theirs), field.name
        elif field.name in {"facts", "branches"}:
            same(ours, theirs)
        else:
            assert ours == theirs, field.name


@pytest.mark.parametrize("groups", [[group(), group(name="q")], []], ids=["two groups", "none"])
def test_a_batch_arrives_unchanged(groups):
    batch: Batch = collate(groups)
    heard = passed_on(TrainStep(batch, 7))
    assert isinstance(heard, TrainStep)
    same(batch, heard.batch)
    assert heard.version == 7


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[0.1, -0.0, torch.inf], [3e38, 1e-45, -2.5]]),
        torch.tensor([0.1, -3.0, 1e30], dtype=torch.bfloat16),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.tensor([[True], [False]]),
        torch.tensor(0.25),
        torch.tensor([[1, 2, 3], [4, 5, 6]]).T,
        torch.empty(0),
        torch.empty(2, 0, dtype=torch.bfloat16),
    ],
    ids=lambda tensor: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}",
)
def test_a_tensor_of_any_dtype_and_shape_arrives_bit_for_bit(tensor):
    batch = collate([group()])
    heard = passed_on(TrainStep(replace(batch, turn_rewards_RT=tensor), 7)).batch.turn_rewards_RT
    assert (heard.dtype, heard.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(heard, tensor)
    assert torch.equal(heard.signbit(), tensor.signbit())


def test_a_field_that_cannot_be_sent_is_named():
    batch = replace(collate([group()]), turn_rewards_RT=object())
    with pytest.raises(TypeError, match=r"a rank command holds a builtins\.object"):
        passed_on(TrainStep(batch, 7))


def test_settings_arrive_unchanged():
    settings = parse_settings(
        {
            "model": {"path": "somewhere"},
            "data": {"path": "none"},
            "environments": {"a": "calculator"},
            "estimator": {"name": "gae", "gae_lambda": 0.5},
            "loss": {"name": "gspo"},
            "correction": {"reject": {"token_k1": [0.9, 1.1]}},
        }
    )
    assert passed_on(CreateLearner(settings, "float64")) == CreateLearner(settings, "float64")


@pytest.mark.parametrize(
    "order", [GatherWeights(), GatherState(), Restore(["master.a"], 3, 1), Heartbeat(), Shutdown()]
)
def test_other_commands_arrive(order):
    assert passed_on(order) == order


@pytest.mark.parametrize("fault", [RuntimeError("Connection closed by peer"), ValueError("of this rank alone")])
def test_no_command_is_sent_after_one_that_failed(fault):
    ranks = Overheard()
    orders = RankCommands(ranks)
    with pytest.raises((RankLostError, ValueError)), orders.broadcast(Heartbeat()):
        raise fault
    with pytest.raises(RankLostError, match="has to be restarted"), orders.broadcast(GatherWeights()):
        pass
    sent = ranks.said
    orders.shut_down()
    assert ranks.said == sent
