"""Published combinations of rollout-correction settings, by name.

`decoupled_*` (three policies): the ratio is taken against the trainer's log-probs from before the first update, and
importance weights correct for the engine. `bypass_*` (two policies): the ratio is taken against the engine's log-probs
(`ppo_clip`), or there is no ratio and importance weights are the only correction (`pg`).

Source: verl, `verl/trainer/config/algorithm.py`, class RolloutCorrectionConfig.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

Rule = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
    "m2po",
]
"""Rejection rules: level and estimator of the divergence between trainer and engine. `m2po` bounds the second moment
of the log-ratio."""


class Preset(NamedTuple):
    """Values that a preset's name stands for; the first four are keys of `[correction]`."""

    weights: Literal["none", "token", "sequence"] = "none"
    weight_range: tuple[float, float] = (0.0, 2.0)
    out_of_range: Literal["truncate", "zero"] = "truncate"
    reject: Mapping[Rule, tuple[float, float]] = MappingProxyType({})
    bypass: bool = False
    """The ratio is taken against the engine's log-probs."""
    loss: str = "clipped"
    """`clipped`: any loss with a ratio; `reinforce`: a loss without one."""


_GEOMETRIC: Final[Mapping[Rule, tuple[float, float]]] = {"seq_mean_k1": (0.999, 1.001)}
_K3: Final[Mapping[Rule, tuple[float, float]]] = {"seq_mean_k3": (0.0, 0.01)}

PRESETS: Final = MappingProxyType(
    {
        "disabled": Preset(),
        "decoupled_token_is": Preset("token"),
        "decoupled_seq_is": Preset("sequence"),
        "decoupled_token_icepop": Preset("token", weight_range=(0.5, 5.0), out_of_range="zero"),
        "decoupled_seq_is_rs": Preset("sequence", reject={"seq_sum_k1": (0.5, 2.0)}),
        "decoupled_geo_rs": Preset(reject=_GEOMETRIC),
        "decoupled_geo_rs_seq_tis": Preset("sequence", reject=_GEOMETRIC),
        "decoupled_geo_rs_token_tis": Preset("token", reject=_GEOMETRIC),
        "decoupled_k3_rs": Preset(reject=_K3),
        "decoupled_k3_rs_seq_tis": Preset("sequence", reject=_K3),
        "decoupled_k3_rs_token_tis": Preset("token", reject=_K3),
        "bypass_ppo_clip": Preset(bypass=True),
        "bypass_ppo_clip_geo_rs": Preset(reject=_GEOMETRIC, bypass=True),
        "bypass_ppo_clip_k3_rs": Preset(reject=_K3, bypass=True),
        "bypass_pg_is": Preset("sequence", bypass=True, loss="reinforce"),
        "bypass_pg_token_icepop": Preset(
            "token", weight_range=(0.5, 5.0), out_of_range="zero", bypass=True, loss="reinforce"
        ),
        "bypass_pg_geo_rs": Preset(reject=_GEOMETRIC, bypass=True, loss="reinforce"),
        "bypass_pg_geo_rs_seq_tis": Preset("sequence", reject=_GEOMETRIC, bypass=True, loss="reinforce"),
        "bypass_pg_geo_rs_token_tis": Preset("token", reject=_GEOMETRIC, bypass=True, loss="reinforce"),
    }
)
"""Presets by name."""
