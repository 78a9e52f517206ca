"""Tries tasks of Harbor's format: their solution must reach the best reward, and an episode without a call must not.

Each is run three times, so that tasks whose reward is up to chance are found. Results are kept beside the tasks, by the
hash of their files (`envs.harbor.check_results`), and the environment `harbor` feeds what is sound.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread
from msgspec import Struct

from envs.harbor.check_results import TaskCheck, read_checks, write_checks
from envs.harbor.config import TaskError
from envs.harbor.episode import TaskEpisode
from envs.harbor.rewards import REWARD, task_parts
from envs.harbor.task import Task, TaskStep
from envs.harbor.task_reader import read_tasks
from envs.harbor.task_sandboxes import Variables
from envs.sandboxes.contract import SandboxEndedError
from stream.errors import EnvironmentFailure
from workers.rollout.sandbox_host import SandboxHost
from workers.rollout.sandboxes import episode_sandboxes
from workers.settings.sandboxes import SandboxSettings

RUNS: Final = 3
BEST: Final = 1.0
_SOLUTION_TIMEOUT_S: Final = 600.0
"""Deadline of a solution whose task gives the policy none."""


class RefusedTask(Struct, frozen=True):
    """A task that cannot be played."""

    name: str
    why: str


class HarborReport(Struct, kw_only=True):
    """What was found out about a folder of tasks."""

    folder: str
    tasks: dict[str, TaskCheck] = {}
    """By the path of the task in the folder, sorted."""
    refused: list[RefusedTask] = []
    unknown_keys: dict[str, int] = {}
    """Keys that the format does not have, which are not read, with the number of tasks that have them."""
    tried: int = 0
    """Tasks that were run now; the others have not changed since."""
    not_sampled: int = 0
    """Tasks that are not in the sample."""

    @property
    def ok(self) -> bool:
        """Whether every task can be played and is sound."""
        return not self.refused and all(task.sound for task in self.tasks.values())


class TaskRun(Struct, frozen=True):
    """How one run of a task ended."""

    value: float | None
    """The reward; None: unmeasured."""
    is_best: bool = False
    why: str = ""
    """Why it is unmeasured."""
    seconds: float = 0.0
    tampered: tuple[str, ...] = ()


async def check_tasks(
    folder: Path,
    settings: SandboxSettings,
    *,
    sample: int = 0,
    again: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> HarborReport:
    """Try the tasks in a folder, as many at a time as sandboxes start at once.

    Args:
        folder: with tasks at any depth.
        settings: where sandboxes are made.
        sample: number of tasks, spread over the folder; 0: all.
        again: also those that have not changed since they were tried.
        progress: gets a line for each task when it was tried.

    Raises:
        DataError: the folder has no tasks.
        SandboxFailure: the place of the sandboxes cannot be reached.
    """
    report = HarborReport(folder=str(folder))
    tasks: list[Task] = []
    for read in await to_thread.run_sync(lambda: list(read_tasks(folder))):
        if isinstance(read, TaskError):
            report.refused.append(RefusedTask(read.name, str(read)))
        else:
            tasks.append(read)
    report.unknown_keys = dict(Counter(key for task in tasks for key in task.unknown_keys).most_common())
    chosen = tasks[:: max(1, len(tasks) // sample)][:sample] if sample else tasks
    report.not_sampled = len(tasks) - len(chosen)
    known = await to_thread.run_sync(read_checks, folder)
    base, limiter = await to_thread.run_sync(folder.resolve), anyio.CapacityLimiter(settings.starts)
    writing = anyio.Lock()
    async with SandboxHost.open(settings) as host, anyio.create_task_group() as group:

        async def check(task: Task) -> None:
            path, digest = task.folder.relative_to(base).as_posix(), await to_thread.run_sync(task.digest)
            former = known.get(path)
            if former is not None and former.digest == digest and not again:
                report.tasks[path] = former
                return
            async with limiter:
                report.tasks[path] = known[path] = await check_task(task, host, digest)
            report.tried += 1
            async with writing:  # a result each: a check that is interrupted loses none
                await to_thread.run_sync(write_checks, folder, known)
            progress(_line(path, known[path]))

        for task in chosen:
            group.start_soon(check, task)
    report.tasks = dict(sorted(report.tasks.items()))
    return report


async def check_task(task: Task, host: SandboxHost, digest: str) -> TaskCheck:
    """Run the solution of a task, and an episode without a call, three times each."""
    runs: dict[str, list[TaskRun]] = {"oracle": [], "nop": []}
    for kind, done in runs.items():
        for _ in range(RUNS):
            done.append(await _run(task, host, solves=kind == "oracle"))
    oracle, nop = runs["oracle"], runs["nop"]
    finding = _finding(oracle, nop)
    return TaskCheck(
        digest=digest,
        sound=not finding,
        finding=finding,
        oracle=[run.value for run in oracle],
        nop=[run.value for run in nop],
        seconds=round(statistics.median(run.seconds for run in (*oracle, *nop)), 2),
        cut_network=task.is_cut(host.settings.network),
        tampered=sorted({path for run in oracle for path in run.tampered}),
    )


async def _run(task: Task, host: SandboxHost, *, solves: bool) -> TaskRun:
    """Play a task, with its solution or without a call."""
    begun = anyio.current_time()
    try:
        with episode_sandboxes(host, None, 0) as sandboxes:
            async with sandboxes.starting():
                episode = TaskEpisode(task, sandboxes, Variables())
                await episode.open()
            rewards, tampered = [], set[str]()
            step: TaskStep | None = episode.step
            while step is not None:
                if solves:
                    with suppress(SandboxEndedError):  # what it left is verified
                        await episode.solve(step.timeout_s or _SOLUTION_TIMEOUT_S)
                verification = await episode.verify()
                tampered.update(verification.tampered)
                if verification.rewards is None and not verification.is_policys:
                    return TaskRun(None, why=verification.reason, seconds=anyio.current_time() - begun)
                rewards += [verification.rewards] if verification.rewards is not None else []
                step = await episode.next_step()
    except EnvironmentFailure as error:
        return TaskRun(None, why=str(error), seconds=anyio.current_time() - begun)
    parts = task_parts(task, rewards) if rewards else 0.0
    value = sum(parts.values()) if isinstance(parts, dict) else parts
    is_best = len(rewards) == len(task.steps) and all(_is_best(each) for each in rewards)
    return TaskRun(value, is_best, "", anyio.current_time() - begun, tuple(sorted(tampered)))


def _is_best(rewards: dict[str, float]) -> bool:
    """Return whether a verifier gave the best reward: 1 or more for `reward`, else for each of its numbers."""
    decisive = [rewards[REWARD]] if REWARD in rewards else rewards.values()
    return all(value >= BEST - 1e-9 for value in decisive)


def _finding(oracle: list[TaskRun], nop: list[TaskRun]) -> str:
    """Return why a task is not sound; empty if it is."""
    for kind, runs in (("the solution", oracle), ("an episode without a call", nop)):
        if unmeasured := next((run for run in runs if run.value is None), None):
            return f"{kind} is unmeasured: {unmeasured.why}"
    for kind, runs in (("the solution", oracle), ("an episode without a call", nop)):
        if len({run.value for run in runs}) > 1:
            return f"flaky: {kind} gives {', '.join(f'{run.value:g}' for run in runs)}"
    if not all(run.is_best for run in oracle):
        return f"the solution gives {oracle[0].value:g}, which is not the best reward"
    if any(run.is_best for run in nop):
        return f"an episode without a call gives the best reward, {nop[0].value:g}"
    return ""


def report_lines(report: HarborReport) -> Iterator[str]:
    """Yield the report as lines of text."""
    sound = [task for task in report.tasks.values() if task.sound]
    yield f"{report.folder}: {len(sound)} of {len(report.tasks)} tasks are sound"
    for path, task in report.tasks.items():
        yield f"  {_line(path, task)}"
        if task.tampered:
            yield f"      its solution changes system files that a verifier may run: {', '.join(task.tampered)}"
    for name, count in Counter(refused.name for refused in report.refused).most_common():
        why = next(refused.why for refused in report.refused if refused.name == name)
        yield f"  refused, {name}: {count}; for example {why}"
    if report.unknown_keys:
        keys = ", ".join(f"{key} ({count})" for key, count in report.unknown_keys.items())
        yield f"  keys that the format does not have, not read: {keys}"
    if cut := sum(task.cut_network for task in report.tasks.values()):
        yield f"  network cut: {cut}; they ask for more than sandboxes.network allows, and were tried without"
    if report.not_sampled:
        yield f"  not in the sample: {report.not_sampled}"


def _line(path: str, task: TaskCheck) -> str:
    def values(rewards: list[float | None]) -> str:
        return " ".join("?" if value is None else f"{value:g}" for value in rewards)

    verdict = "sound" if task.sound else task.finding
    return f"{path}: {verdict} (oracle {values(task.oracle)}, nop {values(task.nop)}, {task.seconds:g} s)"
