"""Checks across keys: combinations that cannot work, or in which a key has no effect, are refused before a start.

::

    data        [data], [[rewards]]            training    [train], [lora]
    rollout     [rollout], [pacing], [eval]    estimators  [filter], [estimator], [algorithm]
    engine      [engine], [weights]            losses      [loss], [correction]

Each check takes the settings and yields messages that name both keys and the remedy.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from stream.errors import SettingsError
from workers.settings.cross_checks import data, engine, estimators, losses, rollout, training
from workers.settings.settings import Settings

Check = Callable[[Settings], Iterator[str]]

ENGINE_CHECKS: Final[tuple[Check, ...]] = (engine.check_engines, engine.check_weights, training.check_lora)
"""Of the keys that an engine reads."""
RUN_CHECKS: Final[tuple[Check, ...]] = (
    data.check_rewards,
    data.check_datasets,
    engine.check_engines,
    engine.check_weights,
    rollout.check_rollout,
    rollout.check_sampling,
    rollout.check_evaluation,
    estimators.check_filters,
    estimators.check_estimator,
    estimators.check_estimator_inputs,
    estimators.check_overlong,
    estimators.check_zero_reward,
    training.check_trainer,
    losses.check_loss,
    losses.check_preset,
    losses.check_correction,
    losses.check_rejection,
    training.check_lora,
)


def check_combinations(settings: Settings, source: str, checks: Sequence[Check] = RUN_CHECKS) -> None:
    """Refuse combinations that cannot work, all at once.

    Args:
        settings: of a run.
        source: file or other place that they come from, for the message.
        checks: which combinations matter.

    Raises:
        SettingsError: names for each of them both keys and the remedy.
    """
    problems = [problem for check in checks for problem in check(settings)]
    if len(problems) > 1:
        problems = [f"({i}) {problem}" for i, problem in enumerate(problems, 1)]
    if problems:
        raise SettingsError(f"{source}: {'; '.join(problems)}")
