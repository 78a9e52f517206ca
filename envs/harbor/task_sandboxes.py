"""The sandboxes of a task: image, limits, environment variables, folders, and the check that they are ready."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import anyio

from envs.harbor.config import HealthcheckTable
from envs.harbor.task import ARTIFACTS, LOGS, VERIFIER_LOGS, Reach, TaskEnvironment
from envs.sandboxes.contract import ExecResult, Network, Sandbox, SandboxProvider, SandboxSpec
from stream.errors import EnvironmentFailure

ROOT: Final = "0"
"""User by which folders of the format are made and emptied."""
SETUP_TIMEOUT_S: Final = 60.0

_DEFAULTS: Final = SandboxSpec()
_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SHELL: Final = 'exec 2>&1; exec "$(command -v bash || echo sh)" -c "$1"'
_FOLDERS: Final = (
    f'mkdir -p {LOGS}/agent {VERIFIER_LOGS} {ARTIFACTS} && chmod 777 {LOGS}/*; [ -z "$1" ] || mkdir -p "$1"'
)


class Variables:
    """Environment variables of a task, in which `${NAME}` and `${NAME:-default}` stand for others.

    Args:
        secrets: values that may stand for `${NAME}`; no other variable of this machine is read.
    """

    def __init__(self, secrets: Mapping[str, str] = _NONE) -> None:
        self._secrets = dict(secrets)

    def resolve(self, env: Mapping[str, str], *, with_secrets: bool) -> dict[str, str]:
        """Return variables with their values.

        Args:
            env: of the task.
            with_secrets: put in secrets; else only defaults are.

        Raises:
            EnvironmentFailure: a name is no secret and has no default.
        """
        known = self._secrets if with_secrets else {}

        def value(match: re.Match[str]) -> str:
            if match[1] in known:
                return known[match[1]]
            if match[2] is None:
                remedy = "list it in args.secrets" if with_secrets else "the policy gets no secrets"
                raise EnvironmentFailure(f"the task needs ${{{match[1]}}}, which is not given: {remedy}")
            return match[2]

        return {name: _VARIABLE.sub(value, text) for name, text in env.items()}

    def redact(self, text: str) -> str:
        """Return a text without the values of secrets."""
        for secret in self._secrets.values():
            text = text.replace(secret, "***") if secret else text
        return text


async def task_image(provider: SandboxProvider, environment: TaskEnvironment) -> str:
    """Return the image of an environment by its digest, built if it has to be.

    Raises:
        SandboxFailure: there is no such image, or it does not build.
        EnvironmentFailure: the provider has no images.
    """
    if not provider.has_images:
        raise EnvironmentFailure(
            f"{type(provider).__name__} has no images, which tasks of Harbor's format need; set sandboxes.provider to "
            '"docker" or "kubernetes"'
        )
    if environment.context is not None:
        return await provider.build(environment.context, environment.build_timeout_s)
    return await provider.resolve(environment.image)


def cut_reach(reach: Reach, most: Network) -> Reach:
    """Return what a phase reaches of what its task asks for: at most `most`."""
    networks = list(Network)
    network = min(reach.network, most, key=networks.index)
    return Reach(network, reach.hosts if network is Network.ALLOWLIST else ())


def sandbox_spec(
    environment: TaskEnvironment, image: str, reach: Reach, env: dict[str, str], *, max_life_s: float, joins: str = ""
) -> SandboxSpec:
    """Return what a sandbox of a task is made of.

    Args:
        environment: limits and working folder.
        image: digest or snapshot.
        reach: of its phase, cut; not used if it joins another sandbox's network.
        env: resolved variables.
        max_life_s: seconds after which it ends by itself.
        joins: name of a sandbox whose network it shares.
    """
    return SandboxSpec(
        image=image,
        workdir=environment.workdir,
        env=env,
        cpus=environment.cpus or _DEFAULTS.cpus,
        memory_mb=environment.memory_mb or _DEFAULTS.memory_mb,
        disk_mb=environment.disk_mb or _DEFAULTS.disk_mb,
        network=reach.network,
        allowed_hosts=reach.hosts,
        joins_network_of=joins,
        max_life_s=max_life_s,
    )


async def run_script(
    sandbox: Sandbox,
    script: str,
    timeout_s: float,
    *,
    user: str = "",
    env: Mapping[str, str] = _NONE,
) -> ExecResult:
    """Run a command line by bash, or by sh where there is none, with its stderr in its stdout."""
    command = ["sh", "-c", _SHELL, "sh", script]
    return await sandbox.exec(command, timeout_s=timeout_s, user=user, env=env)


async def make_folders(sandbox: Sandbox, workdir: str) -> str:
    """Make the folders that the format promises, and return the working folder.

    Raises:
        EnvironmentFailure: they cannot be made.
    """
    command = ["sh", "-c", _FOLDERS, "sh", workdir]
    made = await sandbox.exec(command, timeout_s=SETUP_TIMEOUT_S, user=ROOT, cwd="/")
    if made.code:
        raise EnvironmentFailure(f"{LOGS} and {workdir or 'no folder'} could not be made: {last_lines(made.stderr)}")
    if workdir:
        return workdir
    asked = await sandbox.exec(["pwd"], timeout_s=SETUP_TIMEOUT_S)
    return asked.stdout.decode(errors="replace").strip() or "/"


async def is_healthy(sandbox: Sandbox, check: HealthcheckTable, user: str = "", env: Mapping[str, str] = _NONE) -> bool:
    """Run a healthcheck until it succeeds, or has failed too often; failures in its start period do not count."""
    begun, failures = anyio.current_time(), 0
    while True:
        is_starting = anyio.current_time() < begun + check.start_period_sec
        if (await run_script(sandbox, check.command, check.timeout_sec, user=user, env=env)).code == 0:
            return True
        failures += not is_starting
        if failures >= check.retries:
            return False
        await anyio.sleep(check.start_interval_sec if is_starting else check.interval_sec)


def last_lines(output: bytes, characters: int = 500) -> str:
    """Return the end of an output as text."""
    return output.decode(errors="replace").strip()[-characters:]
