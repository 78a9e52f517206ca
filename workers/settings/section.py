"""Base classes and number types for the tables of a settings file. NaN is none of them."""

import sys
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta, Struct

LARGEST: Final = sys.float_info.max
"""The largest finite number."""

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
FiniteFloat = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
PositiveFloat = Annotated[float, Meta(gt=0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=LARGEST)]
PositiveLimit = Annotated[float, Meta(gt=0)]
"""A bound; infinity: there is none."""
NonNegativeLimit = Annotated[float, Meta(ge=0)]
LeaseSeconds = Annotated[float, Meta(gt=0, le=86400)]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the settings file. Frozen; an unknown key is an error."""

    def non_default(self, *keys: str) -> list[str]:
        """Return the names of keys that differ from their defaults: among these, or among all if none is given.

        Every key of the section must have a default.
        """
        defaults = type(self)()
        return [key for key in keys or self.__struct_fields__ if getattr(self, key) != getattr(defaults, key)]


class NamedOptions(Section, frozen=True, tag_field="name"):
    """A table whose key `name` selects a registered function; its other keys are that function's options."""

    trainer_options: ClassVar[tuple[str, ...]] = ()
    """Options that the trainer reads and the function does not take."""

    @property
    def name(self) -> str:
        """The name under which the function is registered."""
        return str(self.__struct_config__.tag)

    @property
    def options(self) -> dict[str, Any]:
        """The function's keyword arguments."""
        return {key: value for key, value in msgspec.structs.asdict(self).items() if key not in self.trainer_options}


class EstimatorOptions(NamedOptions, frozen=True):
    """Facts about an estimator that checks need. Where its registration declares the same, a test compares them."""

    within_group: ClassVar[bool] = True
    """It compares a completion only with the other completions of its group."""
    compares_group: ClassVar[bool] = True
    """A completion's baseline is, or contains, what other completions of its group earned."""
    per_token: ClassVar[bool] = False
    """Each token has its own advantage."""
    affine: ClassVar[bool] = False
    """Within a group, advantages lie on a straight line over the rewards."""
    opt_out: ClassVar[str] = ""
    """Why a policy may gain by being invalid from its first token on; empty if the average valid completion has no
    negative advantage there."""
    reads: ClassVar[str] = "rewards"
    """What it computes with: `rewards`, `parts` (unmerged) or `correct` (right or wrong)."""


class LossOptions(NamedOptions, frozen=True):
    """Facts about a loss that the cross-checks need. Its registration declares the same; a test compares them."""

    on_policy: ClassVar[bool] = False
    """It uses no ratio to the proximal policy, so it is valid only for the first update of a batch."""
    aggregation: ClassVar[str] = ""
    """The aggregation that defines it; empty: any."""
