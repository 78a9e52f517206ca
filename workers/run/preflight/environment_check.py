"""Makes each environment once, resets it with a row of the data, and asks it for its reward."""

from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread
from msgspec import Struct

from envs.call import CallRunner, Ok, TimedOut, error_cause
from envs.contract import Observation
from envs.factory import EnvironmentFactory
from envs.sandboxes.process import missing_sandbox
from stream.causes import ErrorCause
from stream.errors import PenstockError
from stream.records import Failure, Prompt
from stream.validity import Unmeasured
from workers.rollout.environment_slot import MAX_SNAPSHOT_BYTES, EnvironmentSlot
from workers.run.preflight.findings import PreflightReport
from workers.settings import Settings

LOAD_TIMEOUT_S: Final = 20.0
"""For importing and making what a reference names. What takes longer is not checked further; a run waits for it."""
CALL_TIMEOUT_S: Final = 10.0
"""For one call of user code, unless the settings allow less."""


class CheckedEnvironment(Struct, kw_only=True):
    """An environment that was made, and what its first reset gave."""

    factory: Any
    prompt: Prompt | None = None
    """A row of the data for it."""
    observation: Any = None
    """What `reset` returned (`Observation`)."""
    snapshot: bytes | None = None
    """The environment after `reset`; None if it could not be reset or frozen."""


async def check_environments(
    settings: Settings, prompts: list[Prompt], report: PreflightReport
) -> dict[str, CheckedEnvironment]:
    """Report faults of `[environments]`. Returns those that can be made, in the order of the settings."""
    found: dict[str, CheckedEnvironment] = {}

    async def check(name: str) -> None:
        prompt = next((each for each in prompts if each.environment == name), None)
        if checked := await _check(name, prompt, settings, report):
            found[name] = checked

    async with anyio.create_task_group() as tasks:
        for name in settings.environments:
            tasks.start_soon(check, name)
    report.checked += [f"environment {name}" for name in found]
    return {name: found[name] for name in settings.environments if name in found}


async def load_user_code(
    load: partial[Any], subject: str, place: str, report: PreflightReport
) -> tuple[Any, ErrorCause | None]:
    """Import and construct user code, with a deadline; what fails is reported, and None is returned."""
    outcome = await CallRunner(anyio.CapacityLimiter(1)).call(load, {}, LOAD_TIMEOUT_S)
    if isinstance(outcome, Ok):
        return outcome.value, None
    if isinstance(outcome, TimedOut):
        report.warn(subject, place, f"loading it took more than {LOAD_TIMEOUT_S:g} s, so it was not checked")
        return None, None
    error = outcome.error
    inner = error.__cause__
    cause = error_cause(inner, subject) if inner is not None and not isinstance(inner, ModuleNotFoundError) else None
    text = str(error) if isinstance(error, PenstockError) else error_cause(error, subject).exception
    report.error(subject, place, text, cause)
    return None, cause


async def _check(
    name: str, prompt: Prompt | None, settings: Settings, report: PreflightReport
) -> CheckedEnvironment | None:
    given, subject, place = settings.environments[name], f"environment {name}", f"environments.{name}"
    ref, args = (given, {}) if isinstance(given, str) else (given.ref, given.args)
    factory, _ = await load_user_code(partial(EnvironmentFactory.load, ref, args), subject, place, report)
    if factory is None:
        return None
    checked = CheckedEnvironment(factory=factory, prompt=prompt)
    if warning := await anyio.to_thread.run_sync(missing_sandbox, factory.environment_class, args):
        report.warn(subject, place, warning)
    if not factory.has_reward and not settings.rewards:
        report.error(
            subject,
            place,
            "it has no get_reward and there are no [[rewards]], so nothing would measure a reward; add one of the two",
        )
    if prompt is None:
        return checked
    slot = EnvironmentSlot(name, factory, CallRunner(anyio.CapacityLimiter(2)))
    try:
        await _play(slot, checked, prompt, settings, report)
    finally:
        await slot.close()
    return checked


async def _play(
    slot: EnvironmentSlot, checked: CheckedEnvironment, prompt: Prompt, settings: Settings, report: PreflightReport
) -> None:
    """Reset the environment, and take its reward and its snapshot."""
    subject, place = f"environment {slot.name}", f"environments.{slot.name}"
    timeout_s = min(CALL_TIMEOUT_S, settings.rollout.call_timeout_s)
    if missing := _missing_arguments(checked.factory, prompt):
        columns = ", ".join(prompt.fields) or "no other columns"
        report.error(
            subject,
            place,
            f"reset needs {missing[0]!r}, and a row of the data has {columns}; name the column that it is with "
            f'data.columns = {{ {missing[0]} = "COLUMN" }}, or give the parameter a default',
        )
        return
    observation: Observation | Failure = await slot.reset(prompt.fields, seed=prompt.seed, index=0, timeout_s=timeout_s)
    if isinstance(observation, Failure):
        is_slow = "did not return within" in observation.detail and timeout_s < settings.rollout.call_timeout_s
        add = report.warn if is_slow else report.error
        add(subject, place, f"{observation.detail.partition(': ')[2]} (with the row {prompt.id})", observation.cause)
        return
    checked.observation = observation
    if checked.factory.has_reward and not checked.factory.runs_own_loop:
        for part in await slot.reward(timeout_s, [{"role": "assistant", "content": "I do not know."}]):
            if isinstance(part.reward, Unmeasured):
                why = f"get_reward measures nothing: {part.reward.reason}: {part.reward.detail}"
                problem = f"after an answer without a tool call, {why}; such completions are invalid"
                report.warn(subject, place, problem, part.reward.cause)
    frozen = await slot.freeze(MAX_SNAPSHOT_BYTES, timeout_s)
    if isinstance(frozen, Failure):
        report.error(subject, place, frozen.detail.partition(": ")[2], frozen.cause)
    else:
        checked.snapshot = frozen


def _missing_arguments(factory: EnvironmentFactory, prompt: Prompt) -> list[str]:
    """Return the parameters of `reset` that a row of the data does not have."""
    import inspect

    try:
        parameters = inspect.signature(factory.environment_class.reset).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # a C function without a signature
        return []
    required = [
        name
        for name, parameter in list(parameters.items())[1:]
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    return [name for name in required if name not in {*prompt.fields, "seed", "completion_seed", "completion_index"}]
