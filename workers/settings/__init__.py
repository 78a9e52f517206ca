"""Every setting of a run: typed, frozen, nothing unknown.

::

    section   what a table is             pipeline    [run], [model], [score], [archive], [delivery], [guard]
    engine    [engine]                    data        [data], [environments], [[rewards]]
    presets   published corrections       rollout     [rollout], [eval], [pacing]
    file      TOML in, TOML out           training    [train], [lora], [weights]
    whole     Settings: all of them       estimators  [estimator]: one class to a name, its options
    combinations/   what cannot go        losses      [loss]: the same
                    together              algorithm   [algorithm], [filter], [shaping], [correction], [critic], ...
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
from workers.settings.data import Data, EnvironmentSettings, RewardSettings
from workers.settings.engine import Engine
from workers.settings.estimators import Estimator
from workers.settings.losses import Loss
from workers.settings.pipeline import Archive, Delivery, Guard, Model, Run, Score
from workers.settings.rollout import Eval, Pacing, Rollout
from workers.settings.section import Section
from workers.settings.settings import Settings, sections, setting_keys
from workers.settings.training import Lora, Train, Weights

__all__ = [
    "Algorithm",
    "Archive",
    "Correction",
    "Critic",
    "Data",
    "Delivery",
    "Engine",
    "EnvironmentSettings",
    "Estimator",
    "Eval",
    "Filter",
    "Guard",
    "Lora",
    "Loss",
    "Model",
    "Normalization",
    "Pacing",
    "Rejection",
    "RewardSettings",
    "Rollout",
    "Run",
    "Score",
    "Section",
    "Settings",
    "Shaping",
    "Train",
    "TruncationPolicy",
    "Weights",
    "sections",
    "setting_keys",
]
