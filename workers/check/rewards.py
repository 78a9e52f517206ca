"""Calls each reward function on sample completions of a row, through the same code as a scorer."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Final, Literal

import anyio
import anyio.to_thread
import msgspec

from envs.call import call_subject, describe_error, describe_subject, error_cause, is_async
from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from envs.rewards.loading import CALL_PARAMETERS
from envs.rewards.merge import merge_parts
from envs.rewards.reward_processes import WITHOUT_SANDBOX
from envs.sandboxes.process import sandbox_problem
from stream.errors import PenstockError
from stream.records import Completion, Group, Prompt
from stream.validity import Measured, Reward, RewardReason, Unmeasured
from workers.check.environment import CheckedEnvironment
from workers.check.report import Checker, RewardTrial, SampleReward
from workers.check.user_code import load_user_code, missing_column, named_parameters, required_parameters
from workers.runtime.reward_functions import load_reward_function, measure_completions
from workers.settings import RewardSettings

_OUTSIDE: Final = (RewardReason.UNAVAILABLE, RewardReason.TIMEOUT, RewardReason.MISSING, RewardReason.COMPONENT)
"""Reasons that may not hold for other completions: a server is down, or a value of this one is None."""
_MAX_VALUE: Final = 200
"""Characters of a column's value that a sample completion quotes."""
_PROMPT: Final = "What is the answer?"

Format = Literal["text", "messages"]


async def check_rewards(
    checker: Checker, prompts: list[Prompt], environments: Mapping[str, CheckedEnvironment]
) -> None:
    """Report faults of `[[rewards]]`."""
    for position, given in enumerate(checker.settings.rewards):
        name = given.name or given.ref.rpartition(":")[2]
        place = "" if checker.is_alone else f"rewards[{position}].ref"
        await RewardCheck(checker, given, (f"reward {name}", place), environments).run(prompts)


class RewardCheck:
    """Tries one of `[[rewards]]`.

    Args:
        checker: collects the findings.
        given: its settings.
        subject: its name and place in findings.
        environments: those that could be made.
    """

    def __init__(
        self,
        checker: Checker,
        given: RewardSettings,
        subject: tuple[str, str],
        environments: Mapping[str, CheckedEnvironment],
    ) -> None:
        self._checker, self._given, self._subject, self._environments = checker, given, subject, environments
        self._error, self._warn = partial(checker.error, *subject), partial(checker.warn, *subject)

    async def run(self, prompts: list[Prompt]) -> None:
        """Load the function, and call it on completions of the first row that it measures."""
        checker, ref = self._checker, self._given.ref
        one_process = msgspec.structs.replace(self._given, processes=min(1, self._given.processes))
        load = partial(load_reward_function, one_process)
        function: RewardFunction | None = await load_user_code(checker, load, *self._subject)
        if function is None:
            return
        trial = RewardTrial(
            name=function.name,
            reference_kind="entry point" if ":" not in ref else "file" if ".py:" in ref else "module",
            parameters=named_parameters(function.function),
            is_async=is_async(function.function),
        )
        checker.rewards[function.name] = trial
        wants_sandbox = function.call_options.processes and function.call_options.isolation == "sandbox"
        if wants_sandbox and (problem := await anyio.to_thread.run_sync(sandbox_problem)):
            self._warn(f"this machine makes no sandboxes: {problem}; so {WITHOUT_SANDBOX}")
        prompt = next((each for each in prompts if function.applies_to(each.environment)), None)
        if prompt is None or self._lacks_column(function, prompt):
            return
        if "environments" in trial.parameters and self._snapshot(prompt) is None:
            return  # that the environment cannot be reset has been reported
        call_subject.set(describe_subject(f"{self._subject[0]}, prompt {prompt.id}"))
        await self._open_and_call(function, trial, prompt)
        self._check_context(function)
        checker.checked.append(self._subject[0])

    def _lacks_column(self, function: RewardFunction, prompt: Prompt) -> bool:
        """Report parameters without a default that no column has."""
        given = {*prompt.fields, *CALL_PARAMETERS} - ({"environments"} if not self._environments else set())
        missing = [name for name in required_parameters(function.function) if name not in given]
        for name in missing:
            if name == "environments" and self._checker.is_alone:
                remedy = "give one with --env REF, and what its reset takes with --field"
                self._error("it asks for environments", remedy)
            elif name == "environments":
                self._error("it asks for environments, but [environments] is empty")
            elif f"{name}s" in CALL_PARAMETERS:
                self._error(f"it takes {name!r}: a reward function is called with lists", f"write {name}s")
            else:
                why, remedy = missing_column(self._checker, name, prompt)
                self._error(f"it asks for a column {name!r}{why}", remedy)
        return bool(missing)

    def _snapshot(self, prompt: Prompt) -> bytes | None:
        environment = self._environments.get(prompt.environment or "")
        return environment.snapshot if environment is not None else None

    async def _open_and_call(self, function: RewardFunction, trial: RewardTrial, prompt: Prompt) -> None:
        """Enter the function, and call it; a run gives it prompts in one format, which is unknown if it is alone."""
        formats: list[Format] = ["text" if prompt.is_plain_text else "messages"]
        if self._checker.is_alone:
            formats = ["text", "messages"]
        limit_s = self._checker.load_timeout_s
        results: dict[Format, list[Reward]] = {}
        try:
            with anyio.move_on_after(limit_s) as opening:
                async with function.open():
                    opening.deadline = math.inf
                    for input_format in formats:
                        group = self._sample_group(prompt, input_format)
                        results[input_format] = await self._measure(function, trial, group, input_format)
            if opening.cancelled_caught:
                self._checker.error_if_alone(
                    *self._subject, f"it did not open within {limit_s:g} s; its server may be down"
                )
                return
        except PenstockError as error:
            self._checker.error_if_alone(*self._subject, error)
            return
        except Exception as error:  # noqa: BLE001  (user code: entering it may raise anything)
            self._error(f"entering it raised {describe_error(error)}", cause=error_cause(error, self._subject[0]))
            return
        self._judge(function, trial, prompt, results)

    async def _measure(
        self, function: RewardFunction, trial: RewardTrial, group: Group, input_format: Format
    ) -> list[Reward]:
        """Return the results of one call with all completions; of one call each if that measured none.

        One by one, one failure does not hide another, and a function that cannot take several shows itself.
        """
        completions = group.completions
        together = await self._call(function, group, completions)
        if any(isinstance(reward, Measured) for reward in together) and self._checker.is_alone:
            again = await self._call(function, group, completions)
            alone = [reward for each in completions for reward in await self._call(function, group, [each])]
            if again != together:
                self._warn(f"two calls on the same rows ({input_format}) gave different rewards")
            elif alone != together:
                self._warn(
                    f"rewards of rows scored alone ({input_format}) differ from those of rows scored together",
                    "a run calls it with all completions of one prompt",
                )
        results = together
        if all(isinstance(reward, Unmeasured) for reward in together):
            results = [reward for each in completions for reward in await self._call(function, group, [each])]
            if not any(self._is_failure(function, reward) for reward in results):
                self._report_together(function, together)
        trial.samples += [
            SampleReward(
                input_format=input_format,
                completion=completion.messages[-1]["content"],
                reward=reward,
            )
            for completion, reward in zip(completions, together, strict=True)
        ]
        return results

    async def _call(self, function: RewardFunction, group: Group, completions: list[Completion]) -> list[Reward]:
        environment = self._environments.get(group.prompt.environment or "")
        factory: EnvironmentFactory | None = (
            environment.factory if environment is not None and environment.snapshot else None
        )
        part = msgspec.structs.replace(group, completions=completions)
        result = await measure_completions(part, completions, function, factory, self._checker.call_timeout_s)
        return [merge_parts(function.to_parts(row)) for row in result.rows]

    def _report_together(self, function: RewardFunction, together: list[Reward]) -> None:
        """Report that answers which are measured one by one are not measured in one call, as a run measures a group."""
        for reward in together:
            if isinstance(reward, Unmeasured) and self._is_failure(function, reward):
                add = self._warn if reward.reason in _OUTSIDE else self._error
                message = f"a call with {len(together)} answers {_describe(reward).removeprefix('it ')}"
                remedy = 'a run calls it with all completions of one prompt, unless granularity = "row"'
                add(f"{message}, though each of them alone is measured", remedy, reward.cause)
                return

    def _judge(
        self, function: RewardFunction, trial: RewardTrial, prompt: Prompt, results: dict[Format, list[Reward]]
    ) -> None:
        """Report what was not measured; an error if nothing was, and other completions would fare no better."""
        environment = self._environments.get(prompt.environment or "")
        needs_calls = environment is not None and environment.factory.tools and "environments" in trial.parameters
        failed = {
            input_format: [i for i, reward in enumerate(rows) if self._is_failure(function, reward)]
            for input_format, rows in results.items()
        }
        measures_none = all(len(failed[input_format]) == len(rows) for input_format, rows in results.items())
        for input_format, rows in results.items():
            if not failed[input_format]:
                continue
            reward = rows[failed[input_format][0]]
            assert isinstance(reward, Unmeasured)  # noqa: S101  (narrows the type)
            may_measure_others = not self._checker.is_alone and (reward.reason in _OUTSIDE or needs_calls)
            add = self._error if measures_none and not may_measure_others else self._warn
            answer = trial.samples[failed[input_format][0]].completion
            played = " without a tool call" if needs_calls else ""
            row = f" as {input_format}" if self._checker.is_alone else f" to the row {prompt.id}"
            others = len(failed[input_format]) - 1
            more = f", and {others} other{'s' if others > 1 else ''}" if others else ""
            add(f"{_describe(reward)}, for the answer {answer!r}{played}{row}{more}", cause=reward.cause)
            if add is self._error:  # the other format fails no better
                return
        values = {s.reward.value for s in trial.samples if isinstance(s.reward, Measured)}
        if len(values) == 1 and self._checker.is_alone:
            remedy = "check that it tells right from wrong; give the columns it needs with --field"
            self._warn(f"every row got the reward {values.pop():g}", remedy)

    @staticmethod
    def _is_failure(function: RewardFunction, reward: Reward) -> bool:
        """Return whether a reward is missing; a function may say that it has no part in a completion's reward."""
        if not isinstance(reward, Unmeasured):
            return False
        return not (function.call_options.none == "not_applicable" and reward.reason is RewardReason.MISSING)

    def _check_context(self, function: RewardFunction) -> None:
        """Report a reward model that cannot take the run's longest conversations, when it has been opened."""
        context = getattr(function.function, "context_tokens", 0)  # of `envs.remote.reward_model.RewardModel`
        settings = self._checker.settings
        longest = settings.max_model_len
        if self._checker.is_alone or not isinstance(context, int) or not 0 < context < longest:
            return
        worst = getattr(function.function, "worst_score", None)
        place = self._subject[1].replace(".ref", ".args.worst_score")
        message = (
            f"it takes {context} tokens, and conversations of this run may have {longest} (prompt and "
            f"rollout.max_tokens = {settings.rollout.max_tokens})"
        )
        remedy = "serve it with a longer --max-model-len, or lower rollout.max_tokens"
        if worst is not None:
            message += f"; longer ones get {worst:g}, args.worst_score"
            self._checker.warn(self._subject[0], place, message, remedy)
        else:
            message += "; longer ones would be unmeasured, so that the policy could choose to be"
            remedy += ", or set args.worst_score to a score below all others, for those that are longer"
            self._checker.error(self._subject[0], place, message, remedy)

    def _sample_group(self, prompt: Prompt, input_format: Format) -> Group:
        """Return completions without sense, and ones that quote the row's first columns."""
        values = [str(value)[:_MAX_VALUE] for value in prompt.fields.values() if isinstance(value, str | int | float)]
        boxed = [f"The answer is \\boxed{{{value}}}." for value in values[:1]]
        answers = ["I do not know.", *(boxed or ["42"])]
        if self._checker.is_alone:
            forms = ("Answer: {}", "The answer is \\boxed{{{}}}.")
            quoted = [form.format(value) for value in values[:2] for form in forms]
            answers = ["", answers[0], *(quoted or ["Answer: 42"])]
            messages = [{"role": "user", "content": _PROMPT}]
            prompt = msgspec.structs.replace(prompt, messages=messages, is_plain_text=input_format == "text")
        snapshot = self._snapshot(prompt)
        return Group(
            prompt=prompt,
            completions=[
                Completion(index=i, messages=[{"role": "assistant", "content": text}], turns=1, snapshot=snapshot)
                for i, text in enumerate(answers)
            ],
        )


def _describe(reward: Unmeasured) -> str:
    if reward.reason is RewardReason.RAISED:
        return f"it raised {reward.detail}"
    return f"it measured nothing: {reward.reason}: {reward.detail}"
