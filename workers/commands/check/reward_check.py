"""Call a reward function with sample rows, through the same code as a scorer."""

import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

import anyio

from envs import factory as environments
from envs.call import CallRunner, describe_error, is_async
from envs.factory import EnvironmentFactory
from envs.references import resolve
from envs.rewards import RewardBatch, RewardFunction, loading
from envs.rewards.merge import merge_parts
from envs.snapshot import thaw
from stream.errors import PenstockError, ReferenceNotFoundError
from stream.records import Failure
from stream.validity import Measured, Reward, Unmeasured
from workers.commands.check.check_report import RewardReport, RewardTrial
from workers.rollout.environment_slot import EnvironmentSlot
from workers.settings import Rollout

_PROMPT = "What is the answer?"


def is_reward_function(ref: str, args: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Return whether a reference names a reward function, not an environment factory. Imports the reference."""
    if ":" not in ref:
        names = [
            {entry.name for entry in entry_points(group=g)}
            for g in (environments.ENTRY_POINT_GROUP, loading.ENTRY_POINT_GROUP)
        ]
        return ref in names[1] - names[0]
    try:
        target: Any = resolve(ref, None).target
    except ReferenceNotFoundError:
        return False
    if isinstance(target, type):
        return not hasattr(target, "reset") and any("__call__" in vars(cls) for cls in target.__mro__[:-1])
    if not callable(target) or hasattr(target, "reset"):
        return False
    if loading.is_factory(target, args):  # a factory of environments has the same form
        return "Callable" in str(target.__annotations__.get("return", ""))
    names_, needed = _parameters(target)
    return bool(set(names_) & set(loading.CALL_PARAMETERS)) or bool(set(needed) - set(args))


async def check_reward(
    ref: str,
    fields: dict[str, Any],
    limits: Rollout | None = None,
    args: Mapping[str, Any] = MappingProxyType({}),
    environment: str = "",
) -> RewardReport:
    """Load a reward function and call it with sample rows.

    Args:
        ref: an entry point's name, `package.module:attr`, or `path/to/file.py:attr`.
        fields: columns of the row, the same for each completion.
        limits: deadlines; default: the defaults of `[rollout]`.
        args: arguments of the function, or of its constructor.
        environment: reference of an environment that is reset with the fields; each completion gets its snapshot.
    """
    limits = limits or Rollout()
    report = RewardReport(ref=ref, fields=fields, args=dict(args))
    caller = CallRunner(anyio.CapacityLimiter(4))
    function = await report.load(RewardFunction.load, caller)
    if function is None:
        return report
    names, needed = _parameters(function.function)
    report.name, report.parameters, report.is_async = function.name, names, is_async(function.function)
    report.reference_kind = "entry point" if ":" not in ref else "file" if ".py:" in ref else "module"
    given = {name for name in loading.CALL_PARAMETERS if environment or name != "environments"}
    if missing := set(needed) - {*fields, *given}:
        report.errors += [_missing_argument(name) for name in needed if name in missing]
        return report
    try:
        async with function.open():
            await _call_function(report, function, fields, limits, environment)
    except PenstockError as error:
        report.errors.append(str(error))
    except Exception as error:  # noqa: BLE001  (user code)
        report.errors.append(f"entering it raised {describe_error(error)}")
    report.ok = not report.errors
    return report


def _missing_argument(name: str) -> str:
    if name == "environments":
        return "it asks for environments: give one with --env REF, and what its reset takes with --field"
    return f"it asks for a column {name!r}: give its value with --field {name}=value"


async def _call_function(
    report: RewardReport, function: RewardFunction, fields: dict[str, Any], limits: Rollout, environment: str
) -> None:
    completions = _completions(fields)
    measured: dict[str, list[Reward]] = {}
    for form in ("text", "messages"):
        snapshots = await _snapshots(environment, fields, limits, len(completions)) if environment else None
        batch = _batch(form, completions, fields, snapshots)
        found = await _rewards(function, batch, limits)
        measured[form] = found
        report.trials += [
            RewardTrial(input_format=form, completion=c, reward=r) for c, r in zip(completions, found, strict=True)
        ]
        if any(isinstance(reward, Measured) for reward in found):
            again = await _rewards(function, batch, limits)
            alone = [(await _rewards(function, batch.row(i), limits))[0] for i in range(batch.size)]
            if again != found:
                report.warnings.append(f"two calls on the same rows ({form}) gave different rewards")
            elif alone != found:
                report.warnings.append(
                    f"rewards of rows that were scored alone ({form}) differ from those of rows scored together; a run "
                    "calls it with all completions of one prompt"
                )
    _summarize(report, measured)


async def _rewards(function: RewardFunction, batch: RewardBatch, limits: Rollout) -> list[Reward]:
    """Return the reward of each completion, with parts merged as in a run."""
    return [merge_parts(function.to_parts(entry)) for entry in await function(batch, limits.call_timeout_s)]


def _summarize(report: RewardReport, measured: dict[str, list[Reward]]) -> None:
    reasons = {
        form: {f"{r.reason} {r.detail}".rstrip() for r in found if isinstance(r, Unmeasured)}
        for form, found in measured.items()
    }
    unmeasured_forms = [
        form for form, found in measured.items() if all(isinstance(reward, Unmeasured) for reward in found)
    ]
    if len(unmeasured_forms) == len(measured):
        why_not = "; ".join(sorted(set().union(*reasons.values())))
        report.errors.append(f"it measured none of these rows, so every completion would be invalid: {why_not}")
        return
    for form, found_reasons in reasons.items():
        what = "none of the rows" if form in unmeasured_forms else "some of the rows"
        if found_reasons:
            report.warnings.append(
                f"it measured {what} whose completions are {form}: {'; '.join(sorted(found_reasons))}"
            )
    values = {reward.value for found in measured.values() for reward in found if isinstance(reward, Measured)}
    if len(values) == 1:
        report.warnings.append(
            f"every row got the reward {values.pop():g}; check that it tells right from wrong; give the columns it "
            "needs with --field"
        )


def _completions(fields: dict[str, Any]) -> list[str]:
    """Return sample completions: an empty one, a wrong one, and one with the value of each of the first columns."""
    values = [value for value in fields.values() if isinstance(value, str | int | float)]
    right = [text for value in values[:2] for text in (f"Answer: {value}", f"The answer is \\boxed{{{value}}}.")]
    return ["", "I do not know.", *(right or ["Answer: 42"])]


def _batch(form: str, completions_text: list[str], fields: dict[str, Any], snapshots: list[Any] | None) -> RewardBatch:
    columns = {name: [value] * len(completions_text) for name, value in fields.items()}
    ids = [list(range(len(text))) for text in completions_text]
    if form == "text":
        return RewardBatch([_PROMPT] * len(completions_text), list(completions_text), ids, snapshots, columns)
    prompts = [[{"role": "user", "content": _PROMPT}] for _ in completions_text]
    completions = [[{"role": "assistant", "content": text}] for text in completions_text]
    return RewardBatch(prompts, completions, ids, snapshots, columns)


async def _snapshots(ref: str, fields: dict[str, Any], limits: Rollout, count: int) -> list[Any]:
    """Return snapshots of an environment after an episode without turns."""
    factory = await anyio.to_thread.run_sync(EnvironmentFactory.load, ref)
    slot = EnvironmentSlot(ref, factory, CallRunner(anyio.CapacityLimiter(1)))
    try:
        begun = await slot.reset(fields, seed=0, index=0, timeout_s=limits.call_timeout_s)
        frozen = begun if isinstance(begun, Failure) else None
        data = await slot.freeze(limits.max_snapshot_bytes, limits.call_timeout_s) if frozen is None else frozen
    finally:
        await slot.close()
    if isinstance(data, Failure):
        raise PenstockError(data.detail)
    return [await anyio.to_thread.run_sync(thaw, data, factory) for _ in range(count)]


def _parameters(function: Any) -> tuple[list[str], list[str]]:
    """Return the names of all parameters, and of the required ones."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C has no signature
        return [], []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named], [p.name for p in named if p.default is p.empty]
