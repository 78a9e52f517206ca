"""Calls each reward function on sample completions of a row, through the same code as a scorer."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Final, Literal

import anyio
import anyio.to_thread
import msgspec

from envs.call import call_subject, describe_error, describe_subject, error_cause, is_async
from envs.rewards import RewardFunction
from envs.rewards.loading import CALL_PARAMETERS
from envs.rewards.parts import merge_parts
from envs.rewards.reward_processes import WITHOUT_SANDBOX
from envs.sandboxes.bubblewrap import sandbox_problem
from stream.errors import PenstockError
from stream.records import Completion, Group, Prompt
from stream.validity import Measured, Reward, RewardReason, Unmeasured
from workers.check.environment import CheckedEnvironment
from workers.check.report import Checker, RewardTrial, SampleReward, Subject
from workers.check.user_code import load_user_code, missing_column, named_parameters, required_parameters
from workers.role.rewards import load_reward_function, measure_completions
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
        await RewardCheck(checker.about(f"reward {name}", place), given, environments).run(prompts)


class RewardCheck:
    """Tries one of `[[rewards]]`.

    Args:
        subject: it, in findings.
        given: its settings.
        environments: those that could be made.
    """

    def __init__(self, subject: Subject, given: RewardSettings, environments: Mapping[str, CheckedEnvironment]) -> None:
        self._subject, self._checker, self._given = subject, subject.checker, given
        self._environments = environments
        self._function: RewardFunction
        self._trial: RewardTrial
        self._environment: CheckedEnvironment | None = None
        """The environment that the row names."""

    async def run(self, prompts: list[Prompt]) -> None:
        """Load the function, and call it on completions of the first row that it measures."""
        checker, subject, ref = self._checker, self._subject, self._given.ref
        one_process = msgspec.structs.replace(self._given, processes=min(1, self._given.processes))
        function: RewardFunction | None = await load_user_code(subject, partial(load_reward_function, one_process))
        if function is None:
            return
        self._function = function
        self._trial = RewardTrial(
            name=function.name,
            reference_kind="entry point" if ":" not in ref else "file" if ".py:" in ref else "module",
            parameters=named_parameters(function.function),
            is_async=is_async(function.function),
        )
        checker.rewards[function.name] = self._trial
        wants_sandbox = function.call_options.processes and function.call_options.isolation == "sandbox"
        if wants_sandbox and (problem := await anyio.to_thread.run_sync(sandbox_problem)):
            subject.warn(f"this machine makes no sandboxes: {problem}; so {WITHOUT_SANDBOX}")
        prompt = next((each for each in prompts if function.applies_to(each.environment)), None)
        if prompt is None or self._lacks_column(prompt):
            return
        self._environment = self._environments.get(prompt.environment or "")
        has_snapshot = self._environment is not None and self._environment.snapshot is not None
        if "environments" in self._trial.parameters and not has_snapshot:
            return  # that the environment cannot be reset has been reported
        call_subject.set(describe_subject(f"{subject.name}, prompt {prompt.id}"))
        await self._open_and_call(prompt)
        self._check_context()
        checker.checked.append(subject.name)

    def _lacks_column(self, prompt: Prompt) -> bool:
        """Report parameters without a default that no column has."""
        given = {*prompt.fields, *CALL_PARAMETERS} - ({"environments"} if not self._environments else set())
        missing = [name for name in required_parameters(self._function.function) if name not in given]
        for name in missing:
            if name == "environments" and self._checker.is_alone:
                remedy = "give one with --env REF, and what its reset takes with --field"
                self._subject.error("it asks for environments", remedy)
            elif name == "environments":
                self._subject.error("it asks for environments, but [environments] is empty")
            elif f"{name}s" in CALL_PARAMETERS:
                self._subject.error(f"it takes {name!r}: a reward function is called with lists", f"write {name}s")
            else:
                why, remedy = missing_column(self._checker, name, prompt)
                self._subject.error(f"it asks for a column {name!r}{why}", remedy)
        return bool(missing)

    async def _open_and_call(self, prompt: Prompt) -> None:
        """Enter the function, and call it; a run gives it prompts in one format, which is unknown if it is alone."""
        formats: tuple[Format, ...] = ("text" if prompt.is_plain_text else "messages",)
        limit_s = self._checker.load_timeout_s
        rewards: dict[Format, list[Reward]] = {}
        try:
            with anyio.move_on_after(limit_s) as opening:
                async with self._function.open():
                    opening.deadline = math.inf
                    for input_format in ("text", "messages") if self._checker.is_alone else formats:
                        rewards[input_format] = await self._measure(prompt, input_format)
            if opening.cancelled_caught:
                self._subject.error_if_alone(f"it did not open within {limit_s:g} s; its server may be down")
                return
        except PenstockError as error:
            self._subject.error_if_alone(error)
            return
        except Exception as error:  # noqa: BLE001  (user code: entering it may raise anything)
            cause = error_cause(error, self._subject.name)
            self._subject.error(f"entering it raised {describe_error(error)}", cause=cause)
            return
        self._judge(prompt, rewards)

    async def _measure(self, prompt: Prompt, input_format: Format) -> list[Reward]:
        """Return the rewards of one call with all completions; of one call each if that measured none.

        One by one, one failure does not hide another, and a function that cannot take several shows itself.
        """
        group = self._sample_group(prompt, input_format)
        together = await self._call(group)
        for completion, reward in zip(group.completions, together, strict=True):
            text = completion.messages[-1]["content"]
            self._trial.samples.append(SampleReward(input_format=input_format, completion=text, reward=reward))
        is_measured = any(isinstance(reward, Measured) for reward in together)
        if is_measured and not self._checker.is_alone:
            return together
        singles = [msgspec.structs.replace(group, completions=[each]) for each in group.completions]
        alone = [reward for single in singles for reward in await self._call(single)]
        if not is_measured:
            if not any(map(self._is_failure, alone)):
                self._report_together(together)
            return alone
        if await self._call(group) != together:
            self._subject.warn(f"two calls on the same rows ({input_format}) gave different rewards")
        elif alone != together:
            message = f"rewards of rows scored alone ({input_format}) differ from those of rows scored together"
            self._subject.warn(message, "a run calls it with all completions of one prompt")
        return together

    async def _call(self, group: Group) -> list[Reward]:
        environment, timeout_s = self._environment, self._checker.call_timeout_s
        factory = environment.factory if environment is not None and environment.snapshot else None
        result = await measure_completions(group, group.completions, self._function, factory, timeout_s)
        return [merge_parts(self._function.to_parts(row)) for row in result.rows]

    def _report_together(self, together: list[Reward]) -> None:
        """Report that answers which are measured one by one are not measured in one call, as a run measures a group."""
        reward = next((reward for reward in together if self._is_failure(reward)), None)
        if isinstance(reward, Unmeasured):
            message = f"a call with {len(together)} answers {_describe(reward).removeprefix('it ')}"
            self._subject.add(
                "warning" if reward.reason in _OUTSIDE else "error",
                f"{message}, though each of them alone is measured",
                'a run calls it with all completions of one prompt, unless granularity = "row"',
                reward.cause,
            )

    def _judge(self, prompt: Prompt, rewards: dict[Format, list[Reward]]) -> None:
        """Report what was not measured; an error if nothing was, and other completions would fare no better."""
        is_alone, trial = self._checker.is_alone, self._trial
        needs_calls = self._environment and self._environment.factory.tools and "environments" in trial.parameters
        measures_none = all(self._is_failure(reward) for some in rewards.values() for reward in some)
        for input_format, some in rewards.items():
            failures = [(i, reward) for i, reward in enumerate(some) if self._is_failure(reward)]
            for i, reward in failures[:1]:
                assert isinstance(reward, Unmeasured)  # noqa: S101  (narrows the type)
                may_measure_others = not is_alone and (reward.reason in _OUTSIDE or needs_calls)
                played = " without a tool call" if needs_calls else ""
                row = f" as {input_format}" if is_alone else f" to the row {prompt.id}"
                more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
                self._subject.add(
                    "error" if measures_none and not may_measure_others else "warning",
                    f"{_describe(reward)}, for the answer {trial.samples[i].completion!r}{played}{row}{more}",
                    cause=reward.cause,
                )
            if failures and measures_none:
                return  # the other format fails no better
        values = {sample.reward.value for sample in trial.samples if isinstance(sample.reward, Measured)}
        if len(values) == 1 and is_alone:
            remedy = "check that it tells right from wrong; give the columns it needs with --field"
            self._subject.warn(f"every row got the reward {values.pop():g}", remedy)

    def _is_failure(self, reward: Reward) -> bool:
        """Return whether a reward is missing; a function may say that it has no part in a completion's reward."""
        has_no_part = self._function.call_options.none == "not_applicable"
        return isinstance(reward, Unmeasured) and not (has_no_part and reward.reason is RewardReason.MISSING)

    def _check_context(self) -> None:
        """Report a reward model that cannot take the run's longest conversations, when it has been opened."""
        function, settings = self._function.function, self._checker.settings
        context = getattr(function, "context_tokens", 0)  # of `envs.remote.reward_model.RewardModel`
        longest = settings.max_model_len
        if self._checker.is_alone or not isinstance(context, int) or not 0 < context < longest:
            return
        worst = getattr(function, "worst_score", None)
        subject = self._checker.about(self._subject.name, self._subject.place.replace(".ref", ".args.worst_score"))
        message = (
            f"it takes {context} tokens, and conversations of this run may have {longest} (prompt and "
            f"rollout.max_tokens = {settings.rollout.max_tokens})"
        )
        remedy = "serve it with a longer --max-model-len, or lower rollout.max_tokens"
        if worst is not None:
            subject.warn(f"{message}; longer ones get {worst:g}, args.worst_score", remedy)
            return
        subject.error(
            f"{message}; longer ones would be unmeasured, so that the policy could choose to be",
            f"{remedy}, or set args.worst_score to a score below all others, for those that are longer",
        )

    def _sample_group(self, prompt: Prompt, input_format: Format) -> Group:
        """Return completions without sense, and ones that quote the row's first columns."""
        values = [str(value)[:_MAX_VALUE] for value in prompt.fields.values() if isinstance(value, str | int | float)]
        forms = ("Answer: {}", "The answer is \\boxed{{{}}}.")
        answers = ["I do not know.", *([forms[1].format(values[0])] if values else ["42"])]
        if self._checker.is_alone:
            quoted = [form.format(value) for value in values[:2] for form in forms]
            answers = ["", answers[0], *(quoted or ["Answer: 42"])]
            messages = [{"role": "user", "content": _PROMPT}]
            prompt = msgspec.structs.replace(prompt, messages=messages, is_plain_text=input_format == "text")
        snapshot = self._environment.snapshot if self._environment is not None else None
        completions = [
            Completion(index=i, messages=[{"role": "assistant", "content": text}], turns=1, snapshot=snapshot)
            for i, text in enumerate(answers)
        ]
        return Group(prompt=prompt, completions=completions)


def _describe(reward: Unmeasured) -> str:
    if reward.reason is RewardReason.RAISED:
        return f"it raised {reward.detail}"
    return f"it measured nothing: {reward.reason}: {reward.detail}"
