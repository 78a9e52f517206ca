"""All settings of a run: typed and frozen; unknown keys are errors, and combinations that cannot work are refused."""

from workers.settings.algorithm import (
    AlgorithmSettings,
    CorrectionSettings,
    FilterSettings,
    Normalization,
    TruncationPolicy,
)
from workers.settings.data import DatasetSettings, DataSettings, EnvironmentSettings, RewardSettings
from workers.settings.estimator_options import Estimator
from workers.settings.loss_options import Loss
from workers.settings.rollout import AgentSettings, EvalSettings, PacingSettings, RolloutSettings, SamplingSettings
from workers.settings.run import (
    AbortSettings,
    ArchiveSettings,
    ModelSettings,
    QueueSettings,
    RunSettings,
    ScoreSettings,
)
from workers.settings.sandboxes import SandboxSettings
from workers.settings.section import Section
from workers.settings.settings import Settings, sections, setting_keys
from workers.settings.training import EngineSettings, LoraSettings, TrainSettings, WeightsSettings

__all__ = [
    "AbortSettings",
    "AgentSettings",
    "AlgorithmSettings",
    "ArchiveSettings",
    "CorrectionSettings",
    "DataSettings",
    "DatasetSettings",
    "EngineSettings",
    "EnvironmentSettings",
    "Estimator",
    "EvalSettings",
    "FilterSettings",
    "LoraSettings",
    "Loss",
    "ModelSettings",
    "Normalization",
    "PacingSettings",
    "QueueSettings",
    "RewardSettings",
    "RolloutSettings",
    "RunSettings",
    "SamplingSettings",
    "SandboxSettings",
    "ScoreSettings",
    "Section",
    "Settings",
    "TrainSettings",
    "TruncationPolicy",
    "WeightsSettings",
    "sections",
    "setting_keys",
]
