"""What is possible key by key, but not together: refused before anything starts, naming both keys and the remedy.

::

    data        [data], [[rewards]]            training    [train], [lora]
    rollout     [rollout], [pacing], [eval]    estimators  [filter], [estimator], [shaping], normalizations, [critic]
    engine      [engine], [weights]            losses      [loss], [correction]

Each check takes the settings, and yields what is wrong with them.
"""

from collections.abc import Callable, Iterator
from typing import Final

from stream.errors import SettingsError
from workers.settings.combinations import data, engine, estimators, losses, rollout, training
from workers.settings.whole import Settings

_CHECKS: Final[tuple[Callable[[Settings], Iterator[str]], ...]] = (
    data.rewards,
    data.data_sets,
    engine.engines,
    engine.weights,
    rollout.rollouts,
    rollout.sampling,
    rollout.pacing,
    rollout.evaluation,
    estimators.filters,
    estimators.estimators,
    estimators.shaping,
    training.trainer,
    losses.losses,
    losses.presets,
    losses.corrections,
    training.lora,
)


def refuse_impossible(settings: Settings, source: str) -> None:
    """Refuse combinations that cannot work, or in which a key would silently have no effect.

    Raises:
        SettingsError: the first of them.
    """
    for check in _CHECKS:
        for problem in check(settings):
            raise SettingsError(f"{source}: {problem}")
