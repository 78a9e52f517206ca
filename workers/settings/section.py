"""What every table of the settings is made of."""

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the TOML file."""

    def non_default(self, *keys: str) -> list[str]:
        """Those of these keys, or of all, that are not as they are unless set; of a table that need not be there."""
        defaults = type(self)()
        return [key for key in keys or self.__struct_fields__ if getattr(self, key) != getattr(defaults, key)]


class Choice(Section, frozen=True, tag_field="name"):
    """A table whose key `name` picks a registered function; the other keys are that function's own options."""

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return str(self.__struct_config__.tag)

    @property
    def options(self) -> dict[str, Any]:
        """The function's options by name."""
        return msgspec.structs.asdict(self)


class EstimatorChoice(Choice, frozen=True):
    """What checks across keys must know of an estimator; its registration declares the same (a test compares them)."""

    within_group: ClassVar[bool] = True
    """A completion is compared with its siblings, and with nothing else."""
    per_token: ClassVar[bool] = False
    """Each token has an advantage of its own."""
    reads: ClassVar[str] = "rewards"
    """`rewards`, `parts` (of the reward, unmerged) or `correct` (right or wrong)."""


class LossChoice(Choice, frozen=True):
    """What checks across keys must know of a loss; its registration declares the same (a test compares them)."""

    on_policy: ClassVar[bool] = False
    """It has no ratio to the proximal policy, so it is right for the first update of a batch alone."""
    aggregation: ClassVar[str] = ""
    """The only aggregation that its definition knows; empty: any."""
