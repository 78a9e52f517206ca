"""All settings of a run: typed and frozen; unknown keys are errors, and combinations that cannot work are refused."""

from workers.settings.algorithm import Algorithm, Correction, Filter, Normalization, TruncationPolicy
from workers.settings.data import Data, DatasetSettings, EnvironmentSettings, RewardSettings
from workers.settings.estimator_options import Estimator
from workers.settings.loss_options import Loss
from workers.settings.rollout import Eval, Pacing, Rollout, SamplingSettings
from workers.settings.run import Abort, Archive, Model, Queue, Run, Score
from workers.settings.section import Section
from workers.settings.settings import Settings, sections, setting_keys
from workers.settings.training import Engine, Lora, Train, Weights

__all__ = [
    "Abort",
    "Algorithm",
    "Archive",
    "Correction",
    "Data",
    "DatasetSettings",
    "Engine",
    "EnvironmentSettings",
    "Estimator",
    "Eval",
    "Filter",
    "Lora",
    "Loss",
    "Model",
    "Normalization",
    "Pacing",
    "Queue",
    "RewardSettings",
    "Rollout",
    "Run",
    "SamplingSettings",
    "Score",
    "Section",
    "Settings",
    "Train",
    "TruncationPolicy",
    "Weights",
    "sections",
    "setting_keys",
]
