"""The state of the trainer that reward functions get, for rewards that change during training."""

from typing import NoReturn

from msgspec import Struct

from stream.records import Group


class TrainerState(Struct, frozen=True):
    """TRL's `trainer_state`, as far as a scorer knows it: the state in which the group was sampled.

    It follows from the group, so a group that is scored again gets the same rewards.
    """

    global_step: int = 0
    """The newest policy version that sampled a token of the group."""
    epoch: float = 0.0
    """Completed passes over the data when the prompt was fed."""

    @classmethod
    def of_group(cls, group: Group) -> "TrainerState":
        """Return the state in which a group was sampled."""
        versions = (s.version for c in group.completions for row in c.rows for s in row.spans)
        return cls(max(versions, default=0), float(group.prompt.epoch))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"trainer_state has {', '.join(self.__struct_fields__)}; a scorer does not know {name!r}")
