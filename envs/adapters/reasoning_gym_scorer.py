"""Score answers to reasoning-gym's problems in a child process, where a few scorers evaluate the answer as Python.

Ten data sets give the model's text to `eval`, or to SymPy's `parse_expr`, which calls it. Each answer is scored in a
fork, so that nothing of it stays, and an audit hook sees all code there before it runs: it may consist of constants,
and of names that SymPy's parser writes for numbers, symbols and functions. Anything else would have called something.
"""

import pickle  # noqa: TID251  (problems hold types of reasoning-gym's own; from the worker to its child alone)
import sys
from collections.abc import Mapping
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final

import msgspec
from msgspec import Struct

from envs.references import import_extra
from envs.sandboxes.pools.child_main import report_interim
from envs.sandboxes.pools.forked import run_forked

HANDLER: Final = f"{__name__}:Scorer"
_MAX_BYTES: Final = 1 << 30
"""Data memory for one answer."""
_MAX_SCORERS: Final = 16
_GENERATORS: Final = frozenset({"sympy.polys.monomials", "collections", "dataclasses"})
"""Modules that evaluate code which they make of numbers and names of fields, not of a text."""


class Score(Struct, frozen=True):
    """What the data set's scorer said of an answer."""

    value: float | None = None
    """None: it said nothing."""
    why: str = ""
    """Why not, or which code of the answer was refused."""
    is_late: bool = False
    """It took all of its processor time, or ended the child with it."""


def encode_job(problem: tuple[str, Mapping[str, Any], int], entry: Any, answer: str | None, cpu_s: int) -> bytes:
    """Return the job to score an answer.

    Args:
        problem: name of the data set, its options, and the seed.
        entry: the problem that the model was given.
        answer: None without tags.
        cpu_s: processor time for the answer.
    """
    name, config, seed = problem
    return pickle.dumps((name, dict(config), seed, entry, answer, cpu_s))


def make_problem(name: str, config: Mapping[str, Any], seed: int) -> tuple[Any, Any]:
    """Return a data set of one problem, whose method scores answers, and the problem."""
    library = import_extra("reasoning_gym", "reasoning-gym")
    options = dict(config)
    if "datasets" in options:  # of `composite`, as settings can write it
        spec = library.composite.DatasetSpec
        options["datasets"] = [spec(**{"weight": 1.0, "config": {}, **each}) for each in options["datasets"]]
    dataset = library.create_dataset(name, seed=seed, size=1, **options)
    return dataset, dataset[0]


class Scorer:
    """The handler in a child process."""

    def __init__(self) -> None:
        import_extra("reasoning_gym", "reasoning-gym")
        self._datasets: dict[bytes, Any] = {}

    def __call__(self, job: bytes) -> bytes:
        """Score one answer, as encoded by `encode_job`; return a `Score`.

        Raises:
            TimeoutError: the machine is too busy to score anything.
        """
        name, config, seed, entry, answer, cpu_s = pickle.loads(job)  # noqa: S301  (the worker's own)
        dataset = self._dataset(name, config, seed)
        report_interim(msgspec.msgpack.encode(Score(why="its process ended", is_late=True)))
        forked = run_forked(partial(_score, dataset, answer, entry), cpu_s=cpu_s, max_bytes=_MAX_BYTES)
        if forked.was_kept_waiting:
            raise TimeoutError(forked.why)
        return forked.value or msgspec.msgpack.encode(Score(why=forked.why, is_late=forked.used_its_time))

    def _dataset(self, name: str, config: Mapping[str, Any], seed: int) -> Any:
        """Return the data set of a problem; the completions of a group share it."""
        key = pickle.dumps((name, config, seed))
        if key not in self._datasets:
            if len(self._datasets) >= _MAX_SCORERS:
                self._datasets.pop(next(iter(self._datasets)))
            self._datasets[key], _ = make_problem(name, config, seed)
        return self._datasets[key]


def _score(dataset: Any, answer: str | None, entry: Any) -> bytes:
    """In a fork: score an answer with the guard on."""
    guard = EvaluationGuard()
    sys.addaudithook(guard)
    value = float(dataset.score_answer(answer, entry))
    return msgspec.msgpack.encode(Score(value, guard.refused))


class EvaluationGuard:
    """An audit hook that refuses code which could call anything but mathematical functions.

    Attributes:
        refused: what it refused; empty: nothing.
    """

    def __init__(self) -> None:
        self.refused = ""
        self._mathematical = _mathematical_names()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Look at code that is about to be evaluated.

        Raises:
            PermissionError: it is not mathematics. Many scorers catch it.
        """
        if event != "exec":
            return
        caller = sys._getframe(1)  # noqa: SLF001  (the code that evaluates)
        code = arguments[0]
        evaluator = caller.f_globals.get("__name__")
        if not isinstance(code, CodeType) or evaluator in _GENERATORS or _is_import(caller):
            return
        allowed = frozenset[str]()
        if evaluator == "sympy.parsing.sympy_parser":
            if code.co_names == ("sympy",):
                return  # `from sympy import *`, the parser's own; a text cannot import
            allowed = self._mathematical | set(caller.f_locals.get("local_dict") or ())
        foreign = sorted(set(code.co_names) - allowed)
        if foreign or any(isinstance(constant, CodeType) for constant in code.co_consts):
            self.refused = f"the answer is code that was not run: {', '.join(foreign) or 'it makes a function'}"[:200]
            raise PermissionError(self.refused)


def _is_import(frame: FrameType | None) -> bool:
    """Return whether a module is being imported, which executes its code."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _mathematical_names() -> frozenset[str]:
    """Return the names that SymPy's parser leaves in what it evaluates, without those that do more than compute."""
    sympy = import_extra("sympy", "reasoning-gym")

    functions = {
        name
        for name, value in vars(sympy).items()
        if isinstance(value, type) and issubclass(value, sympy.Function | sympy.Number)
    }
    more = "Symbol Function Add Mul Pow Abs sqrt cbrt root ln factorial pi E I oo S N GoldenRatio EulerGamma Eq Ne"
    return frozenset(functions | set(more.split()))
