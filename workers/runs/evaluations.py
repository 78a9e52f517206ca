"""Evaluations in a run's folder, which the trainer writes and every screen reads.

::

    eval.jsonl                       one line per evaluation
    evaluations/step-000010.groups   its scored groups (MessagePack, an array of records of `stream.codec`)
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field

from stream.codec import decode
from stream.durable import write_file_atomically
from stream.errors import RecordError
from stream.records import Completion, Group
from stream.validity import Measured

FILE: Final = "eval.jsonl"
"""Name of the file in the run's folder."""
GROUPS: Final = "evaluations"
"""Folder of the scored groups."""
_KEPT: Final = 20
"""Evaluations whose groups are kept, the newest ones."""
_NORMAL_95: Final = 1.96
"""Half the width of a 95 % interval of the normal distribution, in standard deviations."""


class EvaluationStats(Struct, kw_only=True):
    """Result of a policy on a set of prompts; `n = valid + mixed + sum of invalid`."""

    prompts: int
    n: int
    """Number of completions requested."""
    valid: int
    """Completions sampled by this version alone, with a measured reward."""
    invalid: dict[str, int]
    """By state. `dead`: the prompt is a dead letter; `missing`: no result came in time."""
    mixed: int
    """Completions with a token of another policy version; they count in no mean."""
    mean_valid: float | None
    """Mean reward of valid completions; None if there is none."""
    mean_all: float | None
    """The same sum divided by valid and invalid completions, as if an invalid one had reward 0."""
    pass_at: dict[str, dict[str, float]]
    """Unbiased estimate that one of k completions succeeds, by k, then `valid` and `all`: mean over prompts with k such
    completions. `all` counts an invalid completion as a failure."""


class EvaluationResult(Struct, kw_only=True):
    """One evaluation, a line of `eval.jsonl`."""

    version: int
    """The evaluated policy version; -1 for a model that no run published."""
    step: int
    time: float
    """Unix time at the end, in seconds."""
    seconds: float
    """Duration."""
    overall: EvaluationStats
    environments: dict[str, EvaluationStats] = field(default_factory=dict)
    """By environment name; empty if the run has none."""


def read_evaluations(folder: Path) -> list[EvaluationResult]:
    """Return all evaluations of a run, in order. Blocks on files."""
    return [result for result, _ in read_lines(folder / FILE)]


def read_lines(path: Path) -> Iterator[tuple[EvaluationResult, int]]:
    """Yield the complete lines, each with the file's length up to its end. A damaged line is skipped."""
    if not path.exists():
        return
    end_offset = 0
    for text in path.read_bytes().splitlines(keepends=True):
        end_offset += len(text)
        if not text.endswith(b"\n"):
            return
        with suppress(ValueError):
            yield msgspec.json.decode(text, type=EvaluationResult), end_offset


def write_groups(folder: Path, step: int, groups: Sequence[bytes]) -> None:
    """Write the scored groups of an evaluation. Those of later steps go: their weights are lost. Blocks on files."""
    file = _groups_file(folder, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file_atomically(file, msgspec.msgpack.encode(groups))
    steps = evaluated_steps(folder)
    kept = [each for each in steps if each <= step][:_KEPT]
    for each in set(steps) - set(kept):
        _groups_file(folder, each).unlink(missing_ok=True)


def evaluated_steps(folder: Path) -> list[int]:
    """Return the steps whose evaluation has its groups here, the last first. Blocks on files."""
    files = (folder / GROUPS).glob("step-*.groups")
    return sorted((int(number) for file in files if (number := file.stem[5:]).isdecimal()), reverse=True)


def read_groups(folder: Path, step: int) -> list[Group]:
    """Return the scored groups of an evaluation, by prompt; a damaged one is left out. Blocks on files."""
    found = []
    with suppress(OSError, ValueError):
        for payload in msgspec.msgpack.decode(_groups_file(folder, step).read_bytes(), type=list[bytes]):
            with suppress(RecordError):
                found.append(decode(payload, Group))
    return sorted(found, key=lambda group: (len(group.prompt.id), group.prompt.id))


def mean_interval(score: EvaluationStats, version: int, groups: Sequence[Group]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean reward over valid completions.

    Completions of one prompt are alike, so the prompts are the independent units: the variance is that of the sum of
    each prompt's deviations from the mean, and the normal distribution is assumed.

    Args:
        score: the statistics to which the interval belongs.
        version: the evaluated policy version.
        groups: all groups that the statistics count.

    Returns:
        The lower and the upper end; None with fewer than two prompts, or if these are not all of the groups.
    """
    rewards = [[_valid_reward(each, score, version) for each in group.completions] for group in groups]
    known = [[reward for reward in some if reward is not None] for some in rewards]
    count, mean = sum(map(len, known)), score.mean_valid
    if mean is None or count != score.valid or len(known) < 2:
        return None
    deviations = [math.fsum(some) - mean * len(some) for some in known]
    variance = math.fsum(each * each for each in deviations) * len(known) / (len(known) - 1)
    half_width = _NORMAL_95 * math.sqrt(variance) / count
    return mean - half_width, mean + half_width


def _valid_reward(completion: Completion, score: EvaluationStats, version: int) -> float | None:
    """Return the reward of a completion that counts in the mean; None for any other."""
    is_excluded = completion.truncated is not None and f"truncated:{completion.truncated}" in score.invalid
    is_mixed = any(span.version != version for row in completion.rows for span in row.spans)
    if completion.failure is not None or is_excluded or is_mixed or not isinstance(completion.reward, Measured):
        return None
    return completion.reward.value


def _groups_file(folder: Path, step: int) -> Path:
    return folder / GROUPS / f"step-{step:06}.groups"
