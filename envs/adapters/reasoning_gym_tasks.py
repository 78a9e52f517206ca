"""Tasks of reasoning-gym: a problem made from the group's seed, scored by the data set's own scorer.

::

    [environments.sums]
    ref = "reasoning_gym"
    args = { dataset = "chain_sum", config = { min_terms = 2, max_terms = 3 } }

    [data]
    rows = 1000                     # problems; no file is needed

Scorers run in child processes, in a sandbox where this machine makes them: some evaluate the model's answer as Python.
"""

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import msgspec

from envs.adapters.reasoning_gym_scorer import HANDLER, Score, encode_job, make_problem
from envs.call import Failed, describe_error, describe_failure
from envs.messages import last_assistant_text
from envs.references import import_extra
from envs.sandboxes.bubblewrap import sandbox_problem, warn_without_sandbox
from envs.sandboxes.pools.child_main import ProcessPoolError
from envs.sandboxes.pools.isolation import Isolation
from envs.sandboxes.pools.shared_pools import finished, pool_timeout_s, run_in_pool, start_pool
from stream.errors import EnvironmentFailure, ReferenceNotFoundError
from stream.validity import Measured, Reward, RewardReason, worst_reward

_EVALUATES = re.compile(r"(?<![\w.])(?:eval|exec)\(|\b(?:sympy|sp)\.(?:parse_expr|sympify)\(|(?<![\w.])parse_expr\(")
_WORST = 0.0
"""The scores of all data sets are in [0, 1]."""


class ReasoningGym:
    """One problem of a data set. The model answers once, in `<answer>` tags.

    Args:
        dataset: name of the data set.
        config: its options, such as `min_terms`. Those of `composite` are `datasets`, a list of tables with `name`, and
            optional `weight` (1) and `config`.
        system: name of one of reasoning-gym's system prompts, or a text of your own; empty: none.
        isolation: `sandbox`, the default: the scorer sees nothing of this machine. Where no sandbox can be made, it
            runs in a child process without the worker's environment, and a data set whose scorer evaluates answers is
            refused. `process`: such a child process is enough.
        cpu_s: seconds of processor time for scoring an answer; one that takes more is worth 0.

    Attributes:
        entry: the problem: question, answer, metadata.
        answer: what the model answered; None without tags.
    """

    without_sandbox: ClassVar[str] = "scorers run in child processes that can read files and use the network"

    def __init__(
        self,
        dataset: str,
        config: Mapping[str, Any] = MappingProxyType({}),
        *,
        system: str = "default",
        isolation: Literal["sandbox", "process"] = "sandbox",
        cpu_s: int = 2,
    ) -> None:
        self.dataset = dataset
        self.entry: dict[str, Any] = {}
        self.answer: str | None = None
        self._config = dict(config)
        self._seed = 0
        self._cpu_s = cpu_s
        utils = import_extra("reasoning_gym.utils", "reasoning-gym")
        self._system = utils.SYSTEM_PROMPTS.get(system, system)
        try:
            scorer, _ = make_problem(dataset, self._config, seed=0)
        except Exception as error:
            raise ReferenceNotFoundError(
                f"reasoning_gym: the data set {dataset!r} with config {self._config} raised {describe_error(error)}"
            ) from error
        if isolation not in ("sandbox", "process"):
            raise ReferenceNotFoundError(f"reasoning_gym: isolation is 'sandbox' or 'process', not {isolation!r}")
        self._isolation = Isolation(self._best_isolation(scorer) if isolation == "sandbox" else "process")

    def __copy__(self) -> "ReasoningGym":
        """Copy the data, without options."""
        copied = object.__new__(type(self))
        copied.__dict__.update({"dataset": self.dataset, "entry": self.entry, "answer": self.answer})
        return copied

    def reset(self, seed: int) -> list[dict[str, str]]:
        """Make the problem; all completions of a group have the same one.

        Raises:
            EnvironmentFailure: no child process can score.
        """
        self.answer, self._seed = None, seed
        try:
            start_pool(HANDLER, {}, self._isolation)  # now, rather than when an answer waits
        except ProcessPoolError as error:
            raise EnvironmentFailure(f"{self.dataset}: {error}") from error
        _, self.entry = make_problem(self.dataset, self._config, seed)
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": self.entry["question"]}]

    def get_reward(self, messages: Sequence[dict[str, Any]]) -> Reward:
        """Return the data set's own score of the answer; an answer that its scorer cannot read is worth 0.

        Raises:
            EnvironmentFailure: no child process could score anything.
        """
        self.answer = extract_answer(last_assistant_text(messages))
        job = encode_job((self.dataset, self._config, self._seed), self.entry, self.answer, self._cpu_s)
        (outcome,) = run_in_pool(HANDLER, {}, self._isolation, [job], pool_timeout_s(self._cpu_s))
        encoded = finished(outcome)
        if encoded is None:
            error = outcome.error if isinstance(outcome, Failed) else None
            raise EnvironmentFailure(f"{self.dataset}: no score: {describe_failure(outcome)}") from error
        return _to_reward(msgspec.msgpack.decode(encoded, type=Score))

    def _best_isolation(self, scorer: Any) -> Literal["sandbox", "process"]:
        """Return the best isolation of this machine.

        Raises:
            ReferenceNotFoundError: the scorer evaluates answers, and this machine makes no sandboxes.
        """
        problem = sandbox_problem()
        if not problem:
            return "sandbox"
        if any(map(_evaluates_answers, _parts(scorer))):
            raise ReferenceNotFoundError(
                f"reasoning_gym: the scorer of {self.dataset!r} evaluates the model's answer as Python, and this "
                f"machine makes no sandbox for it: {problem}. Install bubblewrap, choose another data set, or set "
                'args.isolation = "process": answers that are not mathematics are refused there, but nothing else '
                "protects this machine's files and network"
            )
        warn_without_sandbox("reasoning_gym", self.without_sandbox)
        return "process"


def extract_answer(text: str) -> str | None:
    """Return the text in the last pair of `<answer>` tags, stripped, as reasoning-gym's function does.

    Its regular expression takes quadratic time for a text with many opening tags.
    """
    begin, end = "<answer>", "</answer>"
    answer, position = None, 0
    while (opened := text.find(begin, position)) >= 0 and (closed := text.find(end, opened)) >= 0:
        answer = text[opened + len(begin) : closed]
        position = closed + len(end)
    return None if answer is None else answer.strip()


def _to_reward(score: Score) -> Reward:
    """Return a score as a reward: what an answer does to its scorer is measured, at the worst value."""
    if score.value is None or score.why:
        return worst_reward(_WORST, RewardReason.TIMEOUT if score.is_late else RewardReason.RAISED, score.why)
    if not math.isfinite(score.value):
        return worst_reward(_WORST, RewardReason.RAISED, f"the scorer returned {score.value}")
    return Measured(score.value)


def _parts(scorer: Any) -> Iterator[Any]:
    """Yield a data set, and those that it is composed of."""
    yield scorer
    parts = getattr(scorer, "datasets", None)
    for part in parts.values() if isinstance(parts, dict) else ():
        yield from _parts(part)


def _evaluates_answers(scorer: Any) -> bool:
    """Return whether a scorer's source has a call that evaluates text; a source that cannot be read counts as one."""
    try:
        return bool(_EVALUATES.search(inspect.getsource(type(scorer).score_answer)))
    except (OSError, TypeError):
        return True
