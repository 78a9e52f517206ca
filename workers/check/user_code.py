"""Loads user code with a deadline, and finds out what it asks for that nobody gives it."""

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import anyio

from envs.call import CallRunner, Ok, TimedOut, call_subject, describe_subject, error_cause
from envs.contract import Observation
from envs.factory import EnvironmentFactory
from envs.sandboxes.contract import SandboxFailure
from stream.errors import PenstockError, SettingsError
from stream.records import Failure, Prompt
from stream.validity import RolloutReason
from workers.check.report import Checker, Subject
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.sandbox_host import open_host_if_needed
from workers.rollout.sandboxes import LeasedSandboxes, episode_sandboxes
from workers.settings.sandboxes import SandboxSettings


async def load_user_code(subject: Subject, load: partial[Any]) -> Any:
    """Import and construct user code, with a deadline; what fails is reported, and None is returned."""
    call_subject.set(describe_subject(f"{subject.name}, its module and constructor"))
    outcome = await CallRunner(anyio.CapacityLimiter(1)).call(load, {}, subject.checker.load_timeout_s)
    if isinstance(outcome, Ok):
        return outcome.value
    if isinstance(outcome, TimedOut):
        message = f"loading it took more than {subject.checker.load_timeout_s:g} s, so it was not checked"
        subject.error_if_alone(message)
        return None
    error = outcome.error
    inner = error.__cause__
    cause = (
        error_cause(inner, subject.name) if inner is not None and not isinstance(inner, ModuleNotFoundError) else None
    )
    text = str(error) if isinstance(error, PenstockError) else error_cause(error, subject.name).exception
    subject.error(text, cause=cause)
    return None


def named_parameters(function: object) -> list[str]:
    """Return the names of a function's parameters; none for a C function without a signature."""
    return [parameter.name for parameter in _parameters(function)]


def required_parameters(function: object) -> list[str]:
    """Return the names of the parameters that have no default."""
    return [parameter.name for parameter in _parameters(function) if parameter.default is parameter.empty]


def _parameters(function: object) -> list[inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    return [parameter for parameter in parameters if parameter.kind in named]


def missing_reset_fields(factory: EnvironmentFactory, fields: dict[str, Any]) -> list[str]:
    """Return the parameters of `reset` that neither a row with these fields nor the run gives."""
    given = {*fields, "seed", "completion_seed", "completion_index", "sandboxes"}
    method = inspect.getattr_static(factory.environment_class, "reset", None)  # None: an instance gets it elsewhere
    needed = required_parameters(getattr(factory.environment_class, "reset", None))
    takes_self = not isinstance(method, staticmethod | classmethod)
    return [name for name in needed[takes_self:] if name not in given]


def missing_column(checker: Checker, name: str, prompt: Prompt) -> tuple[str, str]:
    """Return why user code is not given a column, and how to give it.

    Args:
        checker: of the check.
        name: what the code asks for.
        prompt: a row of the data, which has no such field.
    """
    column = checker.settings.data.prompt
    if column and name in (column, "prompt"):
        remedy = f'data.columns = {{ {name} = "{column}" }} gives it to reset and to reward functions, too'
        here = f"; here --field {name}=TEXT does" if checker.is_alone else ""
        return f", and the column {column!r} is the prompt (data.prompt), which only the model reads", remedy + here
    if checker.is_alone:
        return "", f"give its value with --field {name}=VALUE"
    columns = ", ".join(prompt.fields) or "no columns beside the prompt"
    remedy = f'name the column that it is with data.columns = {{ {name} = "COLUMN" }}, or give the parameter a default'
    return f", and a row of the data has {columns}", remedy


@asynccontextmanager
async def sandboxes_if_needed(
    factory: EnvironmentFactory, settings: SandboxSettings
) -> AsyncIterator[LeasedSandboxes | None]:
    """Yield sandboxes of no run for an environment that opens some, and remove them afterwards; None for others.

    Raises:
        SandboxFailure: the place of the sandboxes cannot be reached.
        SettingsError: the provider is not one.
    """
    async with open_host_if_needed({"": factory}, settings) as host:
        with nullcontext() if host is None else episode_sandboxes(host, None, 0) as sandboxes:
            yield sandboxes


async def reset_slot(
    slot: EnvironmentSlot, sandboxes: LeasedSandboxes | None, prompt: Prompt, index: int, timeout_s: float
) -> Observation | Failure:
    """Reset an environment with its sandboxes, if it opens some; one that does not start is a failure of the reset."""
    fields, seed = dict(prompt.fields), prompt.seed
    try:
        if sandboxes is None:
            return await slot.reset(fields, seed, index, timeout_s)
        return await slot.reset_with(sandboxes, fields, seed, index, timeout_s)
    except SandboxFailure as failure:
        return Failure(reason=RolloutReason.SANDBOX, detail=f"{slot.name}: reset: {failure}")


async def try_reset(factory: EnvironmentFactory, prompt: Prompt, timeout_s: float, settings: SandboxSettings) -> None:
    """Reset an environment once, before a model is started for it.

    Raises:
        PenstockError: it asks for a field that the row does not have, or it cannot be reset.
    """
    if missing := missing_reset_fields(factory, prompt.fields):
        fields = " ".join(f"--field {name}=VALUE" for name in missing)
        raise SettingsError(f"{factory.ref}: reset needs {', '.join(map(repr, missing))}; give {fields}")
    slot = EnvironmentSlot(factory.ref, factory, CallRunner(anyio.CapacityLimiter(1)))
    async with sandboxes_if_needed(factory, settings) as sandboxes:
        try:
            observation = await reset_slot(slot, sandboxes, prompt, 0, timeout_s)
        finally:
            await slot.close()
    if isinstance(observation, Failure):
        error = PenstockError(observation.detail)
        error.cause = observation.cause
        raise error
