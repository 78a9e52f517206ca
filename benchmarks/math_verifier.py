"""The reward `math` compared to bare `parse` and `verify` of math-verify, both in two processes, in one run.

    python -m benchmarks.math_verifier [--rows 1536] [--group 16] [--rounds 5] [--json] [--check]

*Bare*: two processes that only parse gold, parse prediction and verify, each for half of the rows. *Ours*: the reward
function as a scorer calls it, group by group (all groups queued), in a pool of two. Both are warm; rounds alternate.
Reported are wall seconds and CPU seconds of all processes, including the parent. `--check` limits the median ratio to
1.5. Results are compared row by row. Last, the delay after its deadline until a hanging verifier is killed.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio

from envs.rewards import RewardBatch, RewardFunction
from envs.rewards.loading import CallOptions
from stream.validity import Measured, RewardReason

LIMIT = 1.5
LATE_S = 1.0
"""A verifier that hangs is ended within its deadline and so long."""
DEADLINE_S = 0.5
HANGS = 10
PROCESSES = 2
_TICKS = 100  # of /proc/PID/stat, a second

Pair = tuple[str, str]


def pairs(count: int, group: int) -> list[Pair]:
    """Return easy rows with distinct answers; the rows of a group have one gold answer, and every third is wrong."""
    made = []
    for i in range(count):
        n = i // group
        numerator, denominator = n % 97 + 1, n // 97 + 2
        kinds = (
            (
                f"\\frac{{{numerator}}}{{{denominator}}}",
                f"By way {i} the share is \\boxed{{{numerator / denominator!r}}}.",
            ),
            (f"{n}", f"First {i + n + 1}, and after the correction it is ${n}$."),
            (f"x+{n}", f"Way {i}: \\boxed{{{n + (i % 9 == 2)}+x}}"),
        )
        gold, answer = kinds[n % 3]
        made.append((gold, answer if i % 6 else f"The answer is \\boxed{{{7777777 + i}}}"))
    return made


def bare(pipe: Connection) -> None:
    """Process: receives rows, sends results and its CPU seconds."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    latex, text = LatexExtractionConfig(), ExprExtractionConfig()
    while rows := pipe.recv():
        began = time.process_time()
        verdicts = []
        for gold, answer in rows:
            expected = parse(f"\\boxed{{{gold}}}", (latex,), raise_on_error=True)
            result = parse(answer, (text, latex), raise_on_error=True)
            verdicts.append(float(verify(expected, result, float_rounding=6, raise_on_error=True)))
        pipe.send((verdicts, time.process_time() - began))


class BareVerifier:
    """Two processes of bare math-verify."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(PROCESSES)]
        self._pipes = [ours for ours, _ in ends]
        self._processes = [context.Process(target=bare, args=(theirs,), daemon=True) for _, theirs in ends]
        for process in self._processes:
            process.start()

    def measure(self, rows: list[Pair]) -> tuple[list[float], float, float]:
        """Verdicts, wall seconds, processor seconds."""
        began, own = time.perf_counter(), time.process_time()
        half = len(rows) // 2
        for pipe, part in zip(self._pipes, (rows[:half], rows[half:]), strict=True):
            pipe.send(part)
        answers = [pipe.recv() for pipe in self._pipes]
        wall = time.perf_counter() - began
        spent = time.process_time() - own + sum(seconds for _, seconds in answers)
        return [verdict for verdicts, _ in answers for verdict in verdicts], wall, spent

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send([])
        for process in self._processes:
            process.join()


def seconds_of(pids: list[int]) -> float:
    """Return CPU seconds of processes since their start."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / _TICKS


async def measure_pool(function: RewardFunction, rows: list[Pair], group: int) -> tuple[list[float], float, float]:
    """Verdicts, wall seconds, processor seconds."""
    pool = function._process_pool.pool
    batches = []
    for start in range(0, len(rows), group):
        part = rows[start : start + group]
        answers = [answers for _, answers in part]
        golds = [gold for gold, _ in part]
        ids = [[1] * 512 for _ in part]  # as a record brings them
        batches.append(RewardBatch(["?"] * len(part), answers, ids, columns={"answer": golds}))
    result: dict[int, list[float]] = {}

    async def score(i: int) -> None:
        entries = await function(batches[i], 30)
        result[i] = [entry.value if isinstance(entry, Measured) else float("nan") for entry in entries]

    before = seconds_of(pool.pids)
    began, own = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as tasks:
        for i in range(len(batches)):
            tasks.start_soon(score, i)
    wall, spent = time.perf_counter() - began, time.process_time() - own
    spent += seconds_of(pool.pids) - before
    return [verdict for i in range(len(batches)) for verdict in result[i]], wall, spent


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Alternate the two, and compare the medians of their ratios to the limit."""
    rows = pairs(arguments.rows, arguments.group)
    side = BareVerifier()
    rounds = []
    function = RewardFunction.load("envs.builtin.math_verifier:Math")
    async with function.open():
        await measure_pool(function, rows[:64], 8)
        side.measure(rows[:64])
        for i in range(arguments.rounds):
            if i % 2:
                mine = await measure_pool(function, rows, arguments.group)
                theirs = side.measure(rows)
            else:
                theirs = side.measure(rows)
                mine = await measure_pool(function, rows, arguments.group)
            assert mine[0] == theirs[0], "the verdicts differ"
            rounds.append({"bare_s": theirs[1], "ours_s": mine[1], "bare_cpu_s": theirs[2], "ours_cpu_s": mine[2]})
    side.close()
    late_s = await lateness()
    wall = statistics.median(each["ours_s"] / each["bare_s"] for each in rounds)
    spent = statistics.median(each["ours_cpu_s"] / each["bare_cpu_s"] for each in rounds)
    return {
        "rows": len(rows),
        "right": sum(theirs[0]),
        "rounds": rounds,
        "bare_rows_per_s": len(rows) / statistics.median(each["bare_s"] for each in rounds),
        "ours_rows_per_s": len(rows) / statistics.median(each["ours_s"] for each in rounds),
        "wall_ratio": wall,
        "cpu_ratio": spent,
        "limit": LIMIT,
        "late_s": late_s,
        "within_limit": wall <= LIMIT and late_s <= LATE_S,
    }


def hang(completions: list[str]) -> list[float]:
    """A verifier that never returns."""
    while completions:
        time.sleep(60)
    return []


async def lateness() -> float:
    """Return the longest delay after a deadline until a hanging verifier is killed."""
    function = RewardFunction.load(f"{__file__}:hang", call_options=CallOptions(processes=2, granularity="row"))
    batch = RewardBatch(["?"], ["x"], [[1]])
    results = []
    async with function.open():
        for _ in range(HANGS):
            began = time.perf_counter()
            (entry,) = await function(batch, DEADLINE_S)
            results.append(time.perf_counter() - began - DEADLINE_S)
            assert entry.reason == RewardReason.TIMEOUT, entry
    return max(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the limit is exceeded")
    arguments = parser.parse_args()
    result = anyio.run(compare, arguments)
    if arguments.json:
        print(json.dumps(result))
    else:
        for each in result["rounds"]:
            print("  ".join(f"{name} {value:.3f}" for name, value in each.items()))
        print(
            f"bare {result['bare_rows_per_s']:.0f} rows/s, ours {result['ours_rows_per_s']:.0f} rows/s; "
            f"wall {result['wall_ratio']:.2f}x, processor {result['cpu_ratio']:.2f}x, limit {LIMIT}x; a hung call is "
            f"killed at most {result['late_s']:.3f} s after its deadline, limit {LATE_S:g} s"
        )
    return 1 if arguments.check and not result["within_limit"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
