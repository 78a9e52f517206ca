"""Tasks of reasoning-gym: a problem made from the group's seed, scored by the data set's own scorer.

::

    [environments.sums]
    ref = "reasoning_gym"
    args = { dataset = "chain_sum", config = { min_terms = 2, max_terms = 3 } }

    [data]
    rows = 1000                     # problems; no file is needed
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from envs.call import describe_error
from envs.extras import import_extra
from envs.messages import last_assistant_text
from stream.errors import ReferenceNotFoundError
from stream.validity import Measured, Reward, RewardReason, worst_reward


class ReasoningGym:
    """One problem of a data set. The model answers once, in `<answer>` tags.

    Args:
        dataset: name of the data set.
        config: its options, such as `min_terms`. Those of `composite` are `datasets`, a list of tables with `name`, and
            optional `weight` (1) and `config`.
        system: name of one of reasoning-gym's system prompts, or a text of your own; empty: none.

    Attributes:
        entry: the problem: question, answer, metadata.
        answer: what the model answered; None without tags.
    """

    def __init__(
        self, dataset: str, config: Mapping[str, Any] = MappingProxyType({}), *, system: str = "default"
    ) -> None:
        self.dataset = dataset
        self.entry: dict[str, Any] = {}
        self.answer: str | None = None
        self._config = dict(config)
        self._library = import_extra("reasoning_gym", "reasoning-gym")
        self._utils = import_extra("reasoning_gym.utils", "reasoning-gym")
        self._system = self._utils.SYSTEM_PROMPTS.get(system, system)
        self._scorer: Any = None
        try:
            self._make(seed=0)
        except Exception as error:
            raise ReferenceNotFoundError(
                f"reasoning_gym: the data set {dataset!r} with config {self._config} raised {describe_error(error)}"
            ) from error

    def __copy__(self) -> "ReasoningGym":
        """Copy the data without the data set, which is code."""
        copied = object.__new__(type(self))
        copied.__dict__.update({"dataset": self.dataset, "entry": self.entry, "answer": self.answer})
        return copied

    def reset(self, seed: int) -> list[dict[str, str]]:
        """Make the problem; all completions of a group have the same one."""
        self.answer = None
        self._scorer, self.entry = self._make(seed)
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": self.entry["question"]}]

    def get_reward(self, messages: Sequence[dict[str, Any]]) -> Reward:
        """Return the data set's own score of the answer; an answer that its scorer cannot read is worth 0."""
        self.answer = self._utils.extract_answer(last_assistant_text(messages))
        try:
            return Measured(float(self._scorer.score_answer(self.answer, self.entry)))
        except Exception as error:  # noqa: BLE001  (a policy must not choose to be unmeasured)
            return worst_reward(0.0, RewardReason.RAISED, describe_error(error))

    def _make(self, seed: int) -> tuple[Any, dict[str, Any]]:
        config = dict(self._config)
        if "datasets" in config:
            spec = self._library.composite.DatasetSpec
            config["datasets"] = [spec(**{"weight": 1.0, "config": {}, **each}) for each in config["datasets"]]
        scorer = self._library.create_dataset(self.dataset, seed=seed, size=1, **config)
        return scorer, scorer[0]
