"""Calls each reward function once, on scripted completions of a row of the data."""

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import anyio
import msgspec

from envs.call import call_subject, describe_error, describe_subject, error_cause
from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from envs.rewards.call_results import RowResult
from envs.rewards.loading import CALL_PARAMETERS
from stream.errors import PenstockError
from stream.records import Completion, Group, Prompt
from stream.validity import RewardReason, Unmeasured
from workers.run.preflight.environment_check import (
    CALL_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    CheckedEnvironment,
    load_user_code,
    missing_column,
)
from workers.run.preflight.findings import PreflightReport
from workers.runtime.reward_functions import load_reward_function, measure_completions
from workers.settings import Settings

_OUTSIDE: Final = (RewardReason.UNAVAILABLE, RewardReason.TIMEOUT, RewardReason.MISSING)
"""Reasons that may not hold for other completions: a server is down, or the function returned None for this one."""
_MAX_VALUE: Final = 200
"""Characters of a column's value that a scripted completion quotes."""


async def check_rewards(
    settings: Settings,
    prompts: list[Prompt],
    environments: Mapping[str, CheckedEnvironment],
    report: PreflightReport,
) -> None:
    """Report faults of `[[rewards]]`."""
    for position, given in enumerate(settings.rewards):
        name = given.name or given.ref.rpartition(":")[2]
        subject, place = f"reward {name}", f"rewards[{position}].ref"
        one_process = msgspec.structs.replace(given, processes=min(1, given.processes))
        function, _ = await load_user_code(partial(load_reward_function, one_process), subject, place, report)
        if function is None:
            continue
        prompt = next((each for each in prompts if function.applies_to(each.environment)), None)
        if prompt is None or _lacks_column(function, prompt, environments, settings, place, report):
            continue
        if "environments" in _parameters(function.function) and not _has_snapshot(prompt, environments):
            continue  # that the environment cannot be reset has been reported
        await _call(function, prompt, environments, subject, place, report)
        _check_context(function, settings, subject, f"rewards[{position}].args.worst_score", report)
        report.checked.append(subject)


def _check_context(
    function: RewardFunction, settings: Settings, subject: str, place: str, report: PreflightReport
) -> None:
    """Report a reward model that cannot take the run's longest conversations, when it has been opened."""
    context = getattr(function.function, "context_tokens", 0)  # of `envs.remote.reward_model.RewardModel`
    longest = settings.max_model_len
    if not isinstance(context, int) or not 0 < context < longest:
        return
    worst = getattr(function.function, "worst_score", None)
    problem = (
        f"it takes {context} tokens, and conversations of this run may have {longest} (prompt and "
        f"rollout.max_tokens = {settings.rollout.max_tokens})"
    )
    remedy = "serve it with a longer --max-model-len, or lower rollout.max_tokens"
    if worst is not None:
        report.warn(subject, place, f"{problem}; longer ones get {worst:g}, args.worst_score; {remedy}")
    else:
        report.error(
            subject,
            place,
            f"{problem}; longer ones would be unmeasured, so that the policy could choose to be; {remedy}, or set "
            "args.worst_score to a score below all others, for those that are longer",
        )


def _lacks_column(
    function: RewardFunction,
    prompt: Prompt,
    environments: Mapping[str, CheckedEnvironment],
    settings: Settings,
    place: str,
    report: PreflightReport,
) -> bool:
    """Report parameters without a default that no column has."""
    given = {*prompt.fields, *CALL_PARAMETERS} - ({"environments"} if not environments else set())
    missing = [name for name in _required_parameters(function.function) if name not in given]
    for name in missing:
        if name == "environments":
            problem = "it asks for environments, but [environments] is empty"
        else:
            problem = f"it asks for a column {name!r}, {missing_column(name, prompt, settings)}"
            if f"{name}s" in CALL_PARAMETERS:
                problem = f"it takes {name!r}: a reward function is called with lists; write {name}s"
        report.error(f"reward {function.name}", place, problem)
    return bool(missing)


async def _call(
    function: RewardFunction,
    prompt: Prompt,
    environments: Mapping[str, CheckedEnvironment],
    subject: str,
    place: str,
    report: PreflightReport,
) -> None:
    environment = environments.get(prompt.environment or "")
    factory: EnvironmentFactory | None = (
        environment.factory if environment is not None and environment.snapshot else None
    )
    group = _scripted_group(prompt, environment)
    call_subject.set(describe_subject(f"{subject}, prompt {prompt.id}"))
    timeout_s = min(CALL_TIMEOUT_S, function.call_options.timeout_s or CALL_TIMEOUT_S)
    together: list[RowResult] = []
    results: list[RowResult] = []
    try:
        with anyio.move_on_after(LOAD_TIMEOUT_S) as opening:
            async with function.open():
                opening.deadline = math.inf
                together = (await measure_completions(group, group.completions, function, factory, timeout_s)).rows
                results = together
                if all(isinstance(result, Unmeasured) for result in together):
                    results = []  # one by one, so that one failure does not hide another
                    for completion in group.completions:
                        alone = msgspec.structs.replace(group, completions=[completion])
                        results += (await measure_completions(alone, [completion], function, factory, timeout_s)).rows
        if opening.cancelled_caught:
            report.warn(subject, place, f"it did not open within {LOAD_TIMEOUT_S:g} s; its server may be down")
            return
    except PenstockError as error:
        report.warn(subject, place, error)
        return
    except Exception as error:  # noqa: BLE001  (user code: entering it may raise anything)
        report.error(subject, place, f"entering it raised {describe_error(error)}", error_cause(error, subject))
        return
    needs_calls = factory is not None and bool(factory.tools) and "environments" in _parameters(function.function)
    failed = {
        i: result
        for i, result in enumerate(results)
        if isinstance(result, Unmeasured) and not _is_not_applicable(result, function)
    }
    if not failed:
        _compare_together(together, function, subject, place, report)
        return
    first, reward = min(failed.items())
    answer = group.completions[first].messages[-1]["content"]
    may_measure_others = reward.reason in _OUTSIDE or needs_calls
    add = report.error if len(failed) == len(results) and not may_measure_others else report.warn
    played = " without a tool call" if needs_calls else ""
    add(subject, place, f"{_describe(reward)}, for the answer {answer!r}{played} to the row {prompt.id}", reward.cause)


def _compare_together(
    together: list[RowResult], function: RewardFunction, subject: str, place: str, report: PreflightReport
) -> None:
    """Report that answers which are measured one by one are not measured in one call, as a run measures a group."""
    for reward in together:
        if isinstance(reward, Unmeasured) and not _is_not_applicable(reward, function):
            add = report.warn if reward.reason in _OUTSIDE else report.error
            problem = f"a call with {len(together)} answers {_describe(reward).removeprefix('it ')}"
            remedy = 'a run calls it with all completions of one prompt, unless granularity = "row"'
            add(subject, place, f"{problem}, though each of them alone is measured; {remedy}", reward.cause)
            return


def _is_not_applicable(reward: Unmeasured, function: RewardFunction) -> bool:
    """Return whether the function said that it has no part in this completion's reward."""
    return function.call_options.none == "not_applicable" and reward.reason is RewardReason.MISSING


def _describe(reward: Unmeasured) -> str:
    match reward.reason:
        case RewardReason.RAISED:
            return f"it raised {reward.detail}"
        case _:
            return f"it measured nothing: {reward.reason}: {reward.detail}"


def _scripted_group(prompt: Prompt, environment: CheckedEnvironment | None) -> Group:
    """Return a group with an answer that is wrong, and one that quotes the row's first columns."""
    values = [str(value)[:_MAX_VALUE] for value in prompt.fields.values() if isinstance(value, str | int | float)]
    answers = ["I do not know.", f"The answer is \\boxed{{{values[0]}}}." if values else "42"]
    snapshot = None if environment is None else environment.snapshot
    return Group(
        prompt=prompt,
        completions=[
            Completion(index=i, messages=[{"role": "assistant", "content": text}], turns=1, snapshot=snapshot)
            for i, text in enumerate(answers)
        ],
    )


def _has_snapshot(prompt: Prompt, environments: Mapping[str, CheckedEnvironment]) -> bool:
    environment = environments.get(prompt.environment or "")
    return environment is not None and environment.snapshot is not None


def _required_parameters(function: Any) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in _parameters(function).values() if p.kind in named and p.default is p.empty]


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a C function without a signature
        return {}
