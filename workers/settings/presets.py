"""Published settings of rollout correction by name.

`decoupled_*`: three policies; ratios are taken against the trainer's log-probs of the moment when the batch was formed,
and importance weights correct for the engine. `bypass_*`: two policies; ratios are taken against the engine's own
log-probs (`ppo_clip`), or there is no ratio and the importance weights are all of the correction (`pg`).

Source: verl, `verl/trainer/config/algorithm.py`, class RolloutCorrectionConfig.
"""

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
"""Rules of rejection: level and estimator of the divergence; `m2po` bounds the second moment."""


class Preset(NamedTuple):
    """What a name stands for; the first six are keys of `[correction]`."""

    weights: Literal["none", "token", "sequence"] = "none"
    lower: float = 0.0
    upper: float = 2.0
    out_of_range: Literal["truncate", "zero"] = "truncate"
    normalize: bool = False
    reject: tuple[tuple[Rule, float, float], ...] = ()
    """Rule, lower and upper bound."""
    bypass: bool = False
    """Ratios are taken against the engine's log-probs."""
    loss: str = "clipped"
    """`clipped`: any loss with a ratio; `reinforce`: none."""


_GEOMETRIC: Final[tuple[tuple[Rule, float, float], ...]] = (("seq_mean_k1", 0.999, 1.001),)
_K3: Final[tuple[tuple[Rule, float, float], ...]] = (("seq_mean_k3", 0.0, 0.01),)

PRESETS: Final = MappingProxyType(
    {
        "disabled": Preset(),
        "decoupled_token_is": Preset("token"),
        "decoupled_seq_is": Preset("sequence"),
        "decoupled_token_icepop": Preset("token", lower=0.5, upper=5.0, out_of_range="zero"),
        "decoupled_seq_is_rs": Preset("sequence", reject=(("seq_sum_k1", 0.5, 2.0),)),
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
            "token", lower=0.5, upper=5.0, out_of_range="zero", bypass=True, loss="reinforce"
        ),
        "bypass_pg_geo_rs": Preset(reject=_GEOMETRIC, bypass=True, loss="reinforce"),
        "bypass_pg_geo_rs_seq_tis": Preset("sequence", reject=_GEOMETRIC, bypass=True, loss="reinforce"),
        "bypass_pg_geo_rs_token_tis": Preset("token", reject=_GEOMETRIC, bypass=True, loss="reinforce"),
    }
)
"""By name."""
