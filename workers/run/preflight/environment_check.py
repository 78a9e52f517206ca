"""Makes each environment once, resets it with a row of the data, and asks it for its reward."""

from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread
from msgspec import Struct

from envs.call import CallRunner, Ok, TimedOut, call_subject, describe_subject, error_cause
from envs.contract import Observation
from envs.factory import EnvironmentFactory
from envs.sandboxes.process import missing_sandbox
from envs.snapshot import thaw_and_watch
from stream.causes import ErrorCause
from stream.errors import PenstockError
from stream.records import Failure, Prompt
from stream.validity import RewardReason, Unmeasured
from workers.rollout.environment_slot import EnvironmentSlot
from workers.run.preflight.findings import PreflightReport
from workers.run.preflight.task_check import compare_tasks
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
    call_subject.set(describe_subject(f"{subject}, its module and constructor"))
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
    if checked.snapshot is not None and settings.rollout.group_size > 1 and settings.estimator.compares_group:
        timeout_s = min(CALL_TIMEOUT_S, settings.rollout.call_timeout_s)
        caller = CallRunner(anyio.CapacityLimiter(2))
        for problem in await compare_tasks(factory, prompt.fields, prompt.seed, caller, timeout_s):
            report.warn(subject, place, f"{problem} (with the row {prompt.id})")
    return checked


def missing_column(name: str, prompt: Prompt, settings: Settings) -> str:
    """Return why user code is not given a column, and how to give it.

    Args:
        name: what the code asks for.
        prompt: a row of the data, which has no such field.
        settings: of the run.
    """
    column = settings.data.prompt
    if column and name in (column, "prompt"):
        given = f'data.columns = {{ {name} = "{column}" }} gives it to reset and to reward functions, too'
        return f"and the column {column!r} is the prompt (data.prompt), which only the model reads; {given}"
    columns = ", ".join(prompt.fields) or "no columns beside the prompt"
    return (
        f"and a row of the data has {columns}; name the column that it is with "
        f'data.columns = {{ {name} = "COLUMN" }}, or give the parameter a default'
    )


async def _play(
    slot: EnvironmentSlot, checked: CheckedEnvironment, prompt: Prompt, settings: Settings, report: PreflightReport
) -> None:
    """Reset the environment, and take its reward and its snapshot."""
    subject, place = f"environment {slot.name}", f"environments.{slot.name}"
    timeout_s = min(CALL_TIMEOUT_S, settings.rollout.call_timeout_s)
    call_subject.set(describe_subject(f"{subject}, prompt {prompt.id}"))
    if missing := _missing_arguments(checked.factory, prompt):
        report.error(subject, place, f"reset needs {missing[0]!r}, {missing_column(missing[0], prompt, settings)}")
        return
    observation: Observation | Failure = await slot.reset(prompt.fields, seed=prompt.seed, index=0, timeout_s=timeout_s)
    if isinstance(observation, Failure):
        is_slow = "did not return within" in observation.detail and timeout_s < settings.rollout.call_timeout_s
        add = report.warn if is_slow else report.error
        problem = f"{observation.detail.partition(': ')[2]} (with the row {prompt.id})"
        if observation.cause and observation.cause.exception == f"KeyError: {settings.data.prompt!r}":
            problem += f"; reset is not given it, {missing_column(settings.data.prompt, prompt, settings)}"
        add(subject, place, problem, observation.cause)
        return
    checked.observation = observation
    if checked.factory.has_reward and not checked.factory.runs_own_loop:
        for part in await slot.reward(timeout_s, [{"role": "assistant", "content": "I do not know."}]):
            if isinstance(part.reward, Unmeasured):
                why = f"get_reward measures nothing: {part.reward.reason}: {part.reward.detail}"
                problem = f"after an answer without a tool call, {why}; such completions are invalid"
                can_never_work = part.reward.reason is RewardReason.NOT_NUMERIC  # text, whatever the model does
                add = report.error if can_never_work else report.warn
                remedy = "; return a number, or a number for each part's name" if can_never_work else ""
                add(subject, place, f"{problem}{remedy}", part.reward.cause)
    frozen = await slot.freeze(settings.rollout.max_snapshot_bytes, timeout_s)
    if isinstance(frozen, Failure):
        report.error(subject, place, frozen.detail.partition(": ")[2], frozen.cause)
    else:
        checked.snapshot = frozen
        _check_size(frozen, checked.factory, subject, settings, report)


def _check_size(
    snapshot: bytes, factory: EnvironmentFactory, subject: str, settings: Settings, report: PreflightReport
) -> None:
    try:
        _, too_large = thaw_and_watch(snapshot, factory)
    except PenstockError:
        return  # reward functions that take environments report it
    if too_large.omitted:
        report.warn(
            subject,
            "rollout.max_snapshot_bytes",
            f"already after reset, {', '.join(sorted(too_large.omitted))} exceeds rollout.max_snapshot_bytes = "
            f"{settings.rollout.max_snapshot_bytes} and is omitted from snapshots: raise it, or drop what reward "
            "functions do not read in __copy__",
        )


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
