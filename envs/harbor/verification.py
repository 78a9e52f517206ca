"""Verifies a step of a task in a sandbox that its policy has never run in.

In shared mode that is a fresh one made of the policy's files, in separate mode one of the verifier's own image with
declared artifacts. The tests come into it afterwards, and the reward is read by the provider's file API. If there is
none, a control decides: the same tests on the untouched image.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, Literal

import anyio
import structlog
from anyio import to_thread
from msgspec import Struct

from envs.harbor.artifacts import fetch_artifacts, temporary_folder
from envs.harbor.rewards import NoRewardError, read_rewards, reward_exists
from envs.harbor.tampering import tampered_files
from envs.harbor.task import (
    SOLUTION,
    TESTS,
    VERIFIER_LOGS,
    Task,
    TaskEnvironment,
    TaskStep,
    TaskVerifier,
    selected_files,
)
from envs.harbor.task_sandboxes import (
    ROOT,
    SETUP_TIMEOUT_S,
    Variables,
    cut_reach,
    last_lines,
    make_folders,
    run_script,
    sandbox_spec,
    task_image,
)
from envs.sandboxes.contract import (
    ChangedFile,
    EpisodeSandboxes,
    FailureKind,
    Sandbox,
    SandboxEndedError,
    SandboxFailure,
)

log = structlog.get_logger()

ATTEMPTS: Final = 3
"""Sandboxes of a verifier that are made, if they are lost."""
_NOT_STARTED: Final = (FailureKind.CREATE, FailureKind.IMAGE)
"""A sandbox of the policy's files does not start, for example because they have no shell."""
_OUTPUT_CHARACTERS: Final = 4000
_CLEAR: Final = """owner=$1; shift; rm -rf "$@" && mkdir -p "$@" || exit
if [ "$owner" ]; then chown "$owner" "$1"; else chmod 777 "$1"; fi"""
"""The verifier's user alone can write its folder, if the task names one; else everyone can, as in Harbor."""

Purpose = Literal["verifier", "control"]
OpenSandbox = Callable[[], AbstractAsyncContextManager[Sandbox]]


class Verification(Struct, kw_only=True):
    """How a step was verified."""

    rewards: dict[str, float] | None = None
    """What the verifier wrote; None: nothing that can be read."""
    reason: str = ""
    """Why there is no reward."""
    is_policys: bool = False
    """There is no reward because of what the policy did: the control wrote one."""
    timed_out: bool = False
    exit_code: int | None = None
    """Of `test.sh`; it decides nothing."""
    output: str = ""
    """The end of what `test.sh` printed."""
    tampered: tuple[str, ...] = ()
    """System files that the policy changed, and the verifier could run or load."""
    forgeable: bool = False
    """It ran in the policy's own sandbox."""
    seconds: float = 0.0


_controls: dict[tuple[str, str, str], bool] = {}
"""Whether the control of a step wrote a reward, by folder, step and image; only those that did."""


class StepVerifier:
    """Verifies the steps of one episode.

    Args:
        task: that is played.
        sandboxes: of the episode.
        variables: resolves environment variables.
        image: of the task's environment.
        is_live: verify in the policy's own sandbox, which the policy can forge.
        max_life_s: of a verifier's sandbox.
    """

    def __init__(
        self,
        task: Task,
        sandboxes: EpisodeSandboxes,
        variables: Variables,
        image: str,
        *,
        is_live: bool,
        max_life_s: float,
    ) -> None:
        self._task, self._sandboxes, self._variables = task, sandboxes, variables
        self._image, self._is_live, self._max_life_s = image, is_live, max_life_s

    async def verify(self, step: TaskStep, agent: Sandbox) -> Verification:
        """Verify what the policy left.

        Args:
            step: that is over.
            agent: the policy's sandbox, which goes on.

        Raises:
            SandboxFailure: the policy's sandbox, or three of the verifier's, were lost.
        """
        begun = time.perf_counter()
        try:
            async with temporary_folder() as folder:
                verification = await self._verify(step, agent, folder)
        except SandboxEndedError as error:  # and its files with it, where a place keeps none of what has ended
            verification = Verification(reason=f"no files are left: {error}")
        if verification.rewards is None:
            verification.is_policys = await self._control_rewards(step)
        verification.seconds = time.perf_counter() - begun
        return verification

    async def _verify(self, step: TaskStep, agent: Sandbox, folder: Path) -> Verification:
        if self._is_live:
            verification = await self._run_tests(step, agent)
            verification.forgeable = True
            return verification
        if step.verifier.separate is not None:
            try:
                open_sandbox = await self._with_artifacts(step.verifier, step.verifier.separate, agent, folder)
            except _CollectError as error:
                return Verification(reason=str(error))
            return await self._attempts(step, open_sandbox, [])
        snapshot = await agent.snapshot()
        changes = await agent.changed_files()  # afterwards: a change that is undone is one all the same
        joins = agent.name if await _is_running(agent) else ""
        open_sandbox = partial(self._open, self._task.environment, snapshot, step.verifier, "verifier", joins)
        try:
            return await self._attempts(step, open_sandbox, changes)
        except SandboxFailure as error:
            if not _never_ran(error):
                raise
            return await self._unless_files_are_broken(step, open_sandbox, changes)

    async def _unless_files_are_broken(
        self, step: TaskStep, open_sandbox: OpenSandbox, changes: list[ChangedFile]
    ) -> Verification:
        """Try again, after a sandbox of the untouched image has run a command: else what the policy left starts none.

        Raises:
            SandboxFailure: the untouched image does not start either, or it is not the start that fails.
        """
        async with self._open(self._task.environment, self._image, step.verifier, "control", "") as untouched:
            await untouched.exec(["true"], timeout_s=SETUP_TIMEOUT_S, user=ROOT, cwd="/")
        try:
            return await self._attempts(step, open_sandbox, changes)
        except SandboxFailure as error:
            if not _never_ran(error):
                raise
            return Verification(reason=f"no sandbox starts from the policy's files: {error}")

    async def _attempts(self, step: TaskStep, open_sandbox: OpenSandbox, changes: list[ChangedFile]) -> Verification:
        """Run the tests in a new sandbox, which is made again if it is lost."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with open_sandbox() as sandbox:
                    verification = await self._run_tests(step, sandbox)
                    verification.tampered = await tampered_files(sandbox, changes)
                    return verification
            except SandboxFailure as error:
                log.warning("harbor.verifier_lost", task=self._task.name, attempt=attempt, why=str(error))
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _run_tests(self, step: TaskStep, sandbox: Sandbox) -> Verification:
        """Put the tests into a sandbox, run them, and read the reward."""
        verification = Verification()
        try:
            await self._prepare(step, sandbox)
            env = self._variables.resolve(step.verifier.env, with_secrets=True)
            result = await run_script(
                sandbox, f"{TESTS}/test.sh", step.verifier.timeout_s, user=step.verifier.user, env=env
            )
            verification.exit_code = result.code
            verification.timed_out = result.ended == "timeout"
            verification.output = self._variables.redact(last_lines(result.stdout, _OUTPUT_CHARACTERS))
        except NoRewardError as error:
            verification.reason = str(error)
            return verification
        except SandboxEndedError as error:
            verification.reason = f"the verifier's sandbox ended: {error}"
        if verification.timed_out:
            verification.reason = f"the tests did not end within {step.verifier.timeout_s:g} s"
            return verification
        try:
            verification.rewards = await read_rewards(sandbox)
        except NoRewardError as error:
            verification.reason = verification.reason or str(error)
        return verification

    async def _prepare(self, step: TaskStep, sandbox: Sandbox) -> None:
        """Empty the folders of the verifier, and put the tests in.

        Raises:
            NoRewardError: a reward is there already, or the folders cannot be emptied: what the policy did.
        """
        folders = [VERIFIER_LOGS, SOLUTION] if step.verifier.has_tests else [VERIFIER_LOGS, TESTS, SOLUTION]
        command = ["sh", "-c", _CLEAR, "sh", step.verifier.user, *folders]
        try:
            cleared = await sandbox.exec(command, timeout_s=SETUP_TIMEOUT_S, user=ROOT, cwd="/")
        except SandboxFailure as error:
            if error.kind is not FailureKind.LOST:
                raise
            raise _NeverRanError(error.kind, str(error)) from error
        if cleared.code:
            raise NoRewardError(f"{' '.join(folders)} could not be emptied: {last_lines(cleared.stderr)}")
        if await reward_exists(sandbox):
            raise NoRewardError("a reward was there before the tests ran")
        if not step.verifier.has_tests:
            await sandbox.write(await to_thread.run_sync(_test_files, self._task.folder, step), user=ROOT)
        script = ["chmod", "+x", f"{TESTS}/test.sh"]
        await sandbox.exec(script, timeout_s=SETUP_TIMEOUT_S, user=ROOT, cwd="/")

    async def _with_artifacts(
        self, verifier: TaskVerifier, environment: TaskEnvironment, agent: Sandbox, folder: Path
    ) -> OpenSandbox:
        """Take the artifacts out of the policy's sandbox; return what opens a verifier's sandbox with them."""
        image = await task_image(self._sandboxes.provider, environment)
        try:
            await self._collect(verifier, agent)
            copies = await fetch_artifacts(agent, verifier.artifacts, folder)
        except SandboxEndedError:  # its files are there still
            open_files = partial(self._open, self._task.environment, await agent.snapshot(), verifier, "verifier", "")
            async with open_files() as files:
                copies = await fetch_artifacts(files, verifier.artifacts, folder)

        @asynccontextmanager
        async def open_sandbox() -> AsyncIterator[Sandbox]:
            async with self._open(environment, image, verifier, "verifier", "") as sandbox:
                await make_folders(sandbox, environment.workdir)
                if copies:
                    await sandbox.write(copies, user=ROOT)
                yield sandbox

        return open_sandbox

    async def _collect(self, verifier: TaskVerifier, agent: Sandbox) -> None:
        """Run the hooks that write artifacts.

        Raises:
            _CollectError: one failed.
        """
        for hook in verifier.collect:
            user = "" if hook.user is None else str(hook.user)
            result = await run_script(agent, hook.command, hook.timeout_sec, user=user)
            if result.code:
                why = last_lines(result.stdout) or f"code {result.code}"
                raise _CollectError(f"the hook {hook.command!r} failed: {why}")

    @asynccontextmanager
    async def _open(
        self, environment: TaskEnvironment, image: str, verifier: TaskVerifier, purpose: Purpose, joins: str
    ) -> AsyncIterator[Sandbox]:
        """Open a sandbox in the verifier's phase, and close it."""
        env = self._variables.resolve(environment.env, with_secrets=False)
        reach = cut_reach(verifier.reach, self._sandboxes.network)
        spec = sandbox_spec(environment, image, reach, env, max_life_s=self._max_life_s, joins=joins)
        sandbox = await self._sandboxes.open(spec, purpose=purpose)
        try:
            yield sandbox
        finally:
            with anyio.CancelScope(shield=True):
                await self._sandboxes.close(sandbox)

    async def _control_rewards(self, step: TaskStep) -> bool:
        """Return whether the same tests write a reward if the policy does nothing."""
        key = (str(self._task.folder), step.name, self._image)
        if key not in _controls:
            environment = self._task.environment
            async with (
                temporary_folder() as folder,
                self._open(environment, self._image, step.verifier, "control", "") as untouched,
            ):
                await make_folders(untouched, environment.workdir)
                control = await self._control(step, untouched, folder)
            if control.rewards is None:
                log.warning("harbor.control_wrote_nothing", task=self._task.name, step=step.name, why=control.reason)
                return False
            _controls[key] = True
        return True

    async def _control(self, step: TaskStep, untouched: Sandbox, folder: Path) -> Verification:
        if step.verifier.separate is None:
            return await self._run_tests(step, untouched)
        try:
            open_sandbox = await self._with_artifacts(step.verifier, step.verifier.separate, untouched, folder)
        except _CollectError as error:
            return Verification(reason=str(error))
        return await self._attempts(step, open_sandbox, [])


class _NeverRanError(SandboxFailure):
    """A sandbox was lost before it had run one command."""


def _never_ran(error: SandboxFailure) -> bool:
    """Return whether a sandbox did not come as far as a command, which can be due to the files that it is made of."""
    return isinstance(error, _NeverRanError) or error.kind in _NOT_STARTED


class _CollectError(Exception):
    """A collect hook failed."""


async def _is_running(sandbox: Sandbox) -> bool:
    """Return whether a sandbox still runs commands, so that its network can be joined."""
    try:
        await sandbox.exec(["true"], timeout_s=SETUP_TIMEOUT_S, user=ROOT, cwd="/")
    except SandboxEndedError:
        return False
    return True


def _test_files(task: Path, step: TaskStep) -> dict[str, bytes | Path]:
    """Return the tests of a step by their paths in a sandbox; a step's own tests replace the task's."""
    return {f"{TESTS}/{name}": file for folder in step.tests for name, file in selected_files(task, folder).items()}
