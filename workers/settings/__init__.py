"""Every setting of a run: typed, frozen, nothing unknown.

::

    section   what a table is             pipeline    run, model, data, rollout, score, pacing, ...
    engine    [engine]                    training    [train], [weights]
    presets   published corrections       estimators  [estimator]: one class to a name, its options
    file      TOML in, TOML out           losses      [loss]: the same
    combinations   what cannot go         algorithm   [algorithm], [filter], [shaping], [correction], [critic], ...
                   together               whole       Settings: all of them
"""

from workers.settings.algorithm import (
    Algorithm,
    Correction,
    Critic,
    Filter,
    Normalization,
    Rejection,
    Shaping,
    TruncationPolicy,
)
from workers.settings.engine import Engine
from workers.settings.estimators import Estimator
from workers.settings.losses import Loss
from workers.settings.pipeline import (
    Archive,
    Data,
    Delivery,
    Environment,
    Eval,
    Guard,
    Model,
    Pacing,
    RewardFunction,
    Rollout,
    Run,
    Score,
)
from workers.settings.section import Section
from workers.settings.training import Train, Weights
from workers.settings.whole import Settings, keys, sections

__all__ = [
    "Algorithm",
    "Archive",
    "Correction",
    "Critic",
    "Data",
    "Delivery",
    "Engine",
    "Environment",
    "Estimator",
    "Eval",
    "Filter",
    "Guard",
    "Loss",
    "Model",
    "Normalization",
    "Pacing",
    "Rejection",
    "RewardFunction",
    "Rollout",
    "Run",
    "Score",
    "Section",
    "Settings",
    "Shaping",
    "Train",
    "TruncationPolicy",
    "Weights",
    "keys",
    "sections",
]
