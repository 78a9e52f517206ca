"""One episode of a task, without a model: its sandbox, its steps one after another, the solution, the verifier.

The environment plays it for a policy, and `penstock check harbor` for the solution and for nobody.
"""

import shlex
from collections.abc import Collection
from pathlib import Path

from anyio import to_thread

from envs.harbor.rewards import reaches
from envs.harbor.task import SOLUTION, TESTS, VERIFIER_LOGS, Task, TaskStep, selected_files
from envs.harbor.task_sandboxes import (
    ROOT,
    SETUP_TIMEOUT_S,
    Variables,
    cut_reach,
    is_healthy,
    last_lines,
    make_folders,
    run_script,
    sandbox_spec,
    task_image,
)
from envs.harbor.verification import StepVerifier, Verification
from envs.sandboxes.contract import EpisodeSandboxes, ExecResult, Sandbox, SandboxEndedError
from stream.errors import EnvironmentFailure

_DEFAULT_LIFE_S = 7200.0
_SETUP_SCRIPT = "setup.sh"


class TaskEpisode:
    """One episode of a task.

    Args:
        task: to play.
        sandboxes: of the episode.
        variables: resolves environment variables.
        is_live: verify in the policy's own sandbox.
        timeout_multiplier: of the policy's deadlines.

    Attributes:
        step: that is played.
        verifications: of the steps that are over.
        workdir: folder in which commands start.
        agent: the policy's sandbox.
    """

    agent: Sandbox

    def __init__(
        self,
        task: Task,
        sandboxes: EpisodeSandboxes,
        variables: Variables,
        *,
        is_live: bool = False,
        timeout_multiplier: float = 1.0,
    ) -> None:
        self.task = task
        self.step: TaskStep = task.steps[0]
        self.verifications: list[Verification] = []
        self.workdir = ""
        self._sandboxes, self._variables, self._is_live = sandboxes, variables, is_live
        self._timeout_multiplier = timeout_multiplier

    @property
    def timeout_s(self) -> float | None:
        """Deadline of the policy in all steps together; None: the task gives none."""
        limits = [step.timeout_s for step in self.task.steps]
        return None if None in limits else sum(filter(None, limits)) * self._timeout_multiplier

    async def open(self) -> None:
        """Start the policy's sandbox, wait until it is ready, and begin the first step.

        Raises:
            SandboxFailure: it does not start.
            EnvironmentFailure: its healthcheck or the first step's setup fails, before the policy did anything.
        """
        task, step = self.task, self.step
        verifiers_s = sum(each.verifier.timeout_s for each in task.steps)
        max_life_s = max(_DEFAULT_LIFE_S, 2 * ((self.timeout_s or 0) + verifiers_s))
        image = await task_image(self._sandboxes.provider, task.environment)
        self._verifier = StepVerifier(
            task, self._sandboxes, self._variables, image, is_live=self._is_live, max_life_s=max_life_s
        )
        env = self._variables.resolve(task.environment.env, with_secrets=False)
        reach = cut_reach(step.reach, self._sandboxes.network)
        spec = sandbox_spec(task.environment, image, reach, env, max_life_s=max_life_s)
        self.agent = await self._sandboxes.open(spec, purpose="agent")
        self.workdir = await make_folders(self.agent, task.environment.workdir)
        check = task.environment.healthcheck
        if check is not None and not await is_healthy(self.agent, check):
            raise EnvironmentFailure(
                f"{task.name}: environment.healthcheck failed {check.retries} times: {check.command}"
            )
        if problem := await self._begin(step):
            raise EnvironmentFailure(f"{task.name}: {problem}")

    async def run(self, command: str, timeout_s: float) -> ExecResult:
        """Run a command of the policy in the working folder.

        Raises:
            SandboxEndedError: the sandbox ended by what ran in it.
        """
        return await run_script(self.agent, command, timeout_s, user=self.step.user)

    async def verify(self) -> Verification:
        """Verify the step that is played, once.

        Raises:
            SandboxFailure: a sandbox was lost.
        """
        position = self.task.steps.index(self.step)
        if len(self.verifications) == position:
            self.verifications.append(await self._verifier.verify(self.step, self.agent))
        return self.verifications[position]

    async def next_step(self) -> TaskStep | None:
        """Begin the step after one that was verified; None: there is none, or it cannot be reached.

        What stops a later step is the policy's doing: it and those after it count 0.
        """
        position = self.task.steps.index(self.step) + 1
        rewards = self.verifications[-1].rewards
        if position == len(self.task.steps) or rewards is None or not reaches(rewards, self.step.min_reward):
            return None
        step = self.task.steps[position]
        try:
            if await self._begin(step):
                return None
        except SandboxEndedError:
            return None
        self.step = step
        return step

    async def solve(self, timeout_s: float) -> ExecResult:
        """Run the solution of the step that is played, as `oracle`.

        Raises:
            EnvironmentFailure: it has none.
        """
        solution = self.step.solution
        if solution is None or "solve.sh" not in await self._write_folder(solution, SOLUTION):
            raise EnvironmentFailure(f"{self.task.name}: {self.step.name or 'the task'} has no solution/solve.sh")
        await self.agent.exec(["chmod", "-R", "a+rX", SOLUTION], timeout_s=SETUP_TIMEOUT_S, user=ROOT, cwd="/")
        await self.agent.exec(["chmod", "+x", f"{SOLUTION}/solve.sh"], timeout_s=SETUP_TIMEOUT_S, user=ROOT, cwd="/")
        env = self._variables.resolve(self.task.solution_env, with_secrets=True)
        return await run_script(self.agent, f"{SOLUTION}/solve.sh", timeout_s, user=self.step.user, env=env)

    async def _begin(self, step: TaskStep) -> str:
        """Put a step's files into the working folder, run its setup, wait until it is ready; return what failed."""
        if self._is_live and self.verifications:  # the tests ran here
            await self.agent.exec(["rm", "-rf", TESTS, VERIFIER_LOGS], timeout_s=SETUP_TIMEOUT_S, user=ROOT, cwd="/")
        files = await self._write_folder(step.workdir, self.workdir) if step.workdir is not None else ()
        if _SETUP_SCRIPT in files:
            script = f'cd {shlex.quote(self.workdir)} && exec "$(command -v bash || echo sh)" ./{_SETUP_SCRIPT}'
            result = await run_script(self.agent, script, SETUP_TIMEOUT_S, user=step.user)
            if result.code:
                return f"step {step.name}: {_SETUP_SCRIPT} failed: {last_lines(result.stdout)}"
        if step.healthcheck is not None and not await is_healthy(self.agent, step.healthcheck, step.user):
            return f"step {step.name}: its healthcheck failed: {step.healthcheck.command}"
        return ""

    async def _write_folder(self, folder: Path, target: str) -> Collection[str]:
        """Write a folder of the task into the policy's sandbox, as root; return its files' names."""
        selected = await to_thread.run_sync(selected_files, self.task.folder, folder)
        files: dict[str, bytes | Path] = {f"{target.rstrip('/')}/{name}": file for name, file in selected.items()}
        if files:
            await self.agent.write(files, user=ROOT)
        return selected.keys()
