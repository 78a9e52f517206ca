"""Tasks of Harbor's format as an environment: a shell in a sandbox for the policy, and a verifier that it cannot reach.

::

    [environments.tasks]
    ref = "harbor"
    args = { path = "tasks" }           # a folder of tasks; each is a row

    [sandboxes]
    provider = "docker"

The prompt is the task's instruction. A turn without a tool call ends the episode, or the step of a task that has more.
"""

import os
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import structlog
from anyio import to_thread

from envs.harbor.check_results import sound_tasks
from envs.harbor.config import TaskError
from envs.harbor.episode import TaskEpisode
from envs.harbor.rewards import task_parts
from envs.harbor.task import Task
from envs.harbor.task_reader import read_task, read_tasks
from envs.harbor.task_sandboxes import Variables
from envs.harbor.verification import ATTEMPTS, Verification
from envs.sandboxes.contract import EpisodeSandboxes, SandboxEndedError
from stream.errors import DataError, EnvironmentFailure
from stream.validity import Reward, RewardReason, Unmeasured, worst_reward

log = structlog.get_logger()

MAX_OUTPUT_CHARACTERS = 10_000
"""What the model reads of a command's output; of longer ones the middle is cut."""
_WORST = 0.0
_SPARE_S = 60.0
"""What a verifier takes besides its tests, for each of its sandboxes."""
_RESET_S = 3600.0
"""Deadline of the start of an episode, which may build an image."""


class Harbor:
    """One task of Harbor's format.

    Args:
        path: folder of tasks, at any depth.
        eval_path: folder of held-out tasks, for `eval.rows`.
        allow_unchecked: feed tasks also if `penstock check harbor` did not find them sound.
        command_timeout_s: deadline of one command of the policy.
        timeout_multiplier: of the policy's deadlines in the tasks.
        live: names of tasks that are verified in the policy's own sandbox, which it can forge.
        secrets: variables of the worker that `${NAME}` may stand for in the env of a verifier.
        tampered: `flag`: a policy that changed system files which the verifier may run is recorded; `worst`: it is also
            worth 0.

    Attributes:
        task: name of the task.
        rewards: what the verifiers wrote, for each step that was verified.
        verifications: how each step was verified.
        tampered_files: system files that the policy changed.
        done: the sandbox ended by what ran in it.
    """

    def __init__(
        self,
        path: str,
        *,
        eval_path: str = "",
        allow_unchecked: bool = False,
        command_timeout_s: float = 60.0,
        timeout_multiplier: float = 1.0,
        live: Sequence[str] = (),
        secrets: Sequence[str] = (),
        tampered: Literal["flag", "worst"] = "flag",
    ) -> None:
        if tampered not in ("flag", "worst"):
            raise EnvironmentFailure(f"harbor: tampered is 'flag' or 'worst', not {tampered!r}")
        self.task = ""
        self.rewards: list[dict[str, float]] = []
        self.verifications: list[Verification] = []
        self.tampered_files: list[str] = []
        self.done = False
        self._paths = {"train": path, "eval": eval_path}
        self._allow_unchecked = allow_unchecked
        self._command_timeout_s, self._timeout_multiplier = command_timeout_s, timeout_multiplier
        self._live, self._tampered = frozenset(live), tampered
        self._variables = Variables({name: os.environ[name] for name in secrets if name in os.environ})
        self._episode: TaskEpisode | None = None

    def __copy__(self) -> "Harbor":
        """Copy the data of the episode, without options and sandboxes."""
        copied = object.__new__(type(self))
        copied.__dict__.update({name: value for name, value in vars(self).items() if not name.startswith("_")})
        return copied

    @property
    def timeouts_s(self) -> Mapping[str, float]:
        """Deadlines of the methods that take longer than others."""
        verifier_s = self._episode.step.verifier.timeout_s if self._episode is not None else 0.0
        verification_s = (ATTEMPTS + 1) * (verifier_s + _SPARE_S)
        return {
            "reset": _RESET_S,
            "bash": self._command_timeout_s + _SPARE_S,
            "write_file": _SPARE_S,
            "respond": verification_s + _RESET_S,
            "get_reward": verification_s,
        }

    @property
    def episode_timeout_s(self) -> float | None:
        """Deadline of the episode, if the task gives one."""
        return self._episode.timeout_s if self._episode is not None else None

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """Return a row for each task.

        Raises:
            DataError: there is none.
        """
        path = self._paths.get(split, "")
        if not path:
            raise DataError("harbor: eval.rows needs held-out tasks; set args.eval_path to a folder of them")
        folder = Path(path).expanduser()
        tasks: list[Task] = []
        refused: list[TaskError] = []
        for task in read_tasks(folder):
            (refused if isinstance(task, TaskError) else tasks).append(task)  # type: ignore[arg-type]
        for error in refused:
            log.warning("harbor.task_refused", name=error.name, why=str(error))
        sound = tasks if self._allow_unchecked else sound_tasks(folder, tasks)
        if len(sound) < len(tasks):
            log.warning("harbor.tasks_unchecked", path=path, tasks=len(tasks), sound=len(sound))
        if not sound:
            raise DataError(
                f"{path}: {len(tasks)} tasks can be played, and none was found sound: run `penstock check harbor "
                f"{path}`, or set args.allow_unchecked = true"
            )
        base = folder.resolve()
        return [
            {
                "prompt": task.steps[0].instruction,
                "task": (folder / task.folder.relative_to(base)).as_posix(),
                "name": task.name,
                **task.columns,
            }
            for task in sound
        ]

    async def reset(self, task: str, sandboxes: EpisodeSandboxes) -> None:
        """Start the task's sandbox.

        Args:
            task: folder of the task.
            sandboxes: of the episode.

        Raises:
            EnvironmentFailure: the task cannot be started.
        """
        self.rewards, self.verifications, self.tampered_files, self.done = [], [], [], False
        try:
            read = await to_thread.run_sync(read_task, Path(task))
        except TaskError as error:
            raise EnvironmentFailure(str(error)) from error
        self.task = read.name
        self._episode = TaskEpisode(
            read,
            sandboxes,
            self._variables,
            is_live=read.name in self._live,
            timeout_multiplier=self._timeout_multiplier,
        )
        await self._episode.open()

    async def bash(self, command: str) -> str:
        """Run a command line in a shell of its own, and read what it printed.

        Args:
            command: The command line. The working folder is the task's; variables are not kept for the next call.
        """
        try:
            result = await self._playing.run(command, self._command_timeout_s)
        except SandboxEndedError:
            self.done = True
            raise
        text = _cut(result.stdout.decode(errors="replace").rstrip("\n"))
        if result.ended == "timeout":
            ending = f"(it did not end within {self._command_timeout_s:g} s, and was killed)"
        else:
            ending = f"(exit code {result.code})" if result.code else ""
        return "\n".join(filter(None, [text, ending])) or "(no output)"

    async def write_file(self, path: str, content: str) -> str:
        """Write a text file, in place of one that is there.

        Args:
            path: Absolute, or from the working folder.
            content: The whole text.
        """
        episode = self._playing
        target = posixpath.normpath(posixpath.join(episode.workdir, path))
        data = content.encode("utf-8", "replace")
        await episode.agent.write({target: data}, user=episode.step.user)
        return f"{target}: {len(data)} bytes written"

    async def respond(self, text: str) -> str | None:  # noqa: ARG002
        """End the step: return the next one's instruction, or None if there is none."""
        episode = self._playing
        if len(episode.task.steps) == 1:
            return None
        self._record(await episode.verify())
        step = await episode.next_step()
        return step.instruction if step is not None else None

    async def get_reward(self) -> Reward | float | dict[str, float]:
        """Return what the verifier wrote; parts if it wrote several numbers, or the task has several steps."""
        episode = self._playing
        verification = await episode.verify()
        if len(self.verifications) < len(episode.verifications):
            self._record(verification)
        if verification.rewards is None:
            reason = RewardReason.TIMEOUT if verification.timed_out else RewardReason.RAISED
            if not verification.is_policys:
                return Unmeasured(reason, f"{verification.reason}; the untouched image gives no reward either")
            if len(episode.task.steps) == 1:
                return worst_reward(_WORST, reason, verification.reason)
        if self.tampered_files and self._tampered == "worst":
            return worst_reward(_WORST, RewardReason.RAISED, f"changed system files: {', '.join(self.tampered_files)}")
        return task_parts(episode.task, self.rewards)

    @property
    def _playing(self) -> TaskEpisode:
        if self._episode is None:
            raise EnvironmentFailure("no task was started")
        return self._episode

    def _record(self, verification: Verification) -> None:
        """Keep how a step was verified with the completion."""
        self.verifications.append(verification)
        if verification.rewards is not None:
            self.rewards.append(verification.rewards)
        if verification.tampered:
            self.tampered_files = sorted({*self.tampered_files, *verification.tampered})
            log.warning("harbor.tampered", task=self.task, files=list(verification.tampered[:10]))


def _cut(text: str) -> str:
    """Return a text without its middle, if it is long."""
    half = MAX_OUTPUT_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n... {len(text)} characters in all ...\n{text[-half:]}"
