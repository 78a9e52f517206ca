"""Play given turns, or sample calls, in an environment, and report what it answered, its reward and its snapshot."""

from collections.abc import Iterator, Sequence
from functools import partial

import anyio
import msgspec

from envs.call import CallRunner
from envs.contract import Observation
from envs.factory import EnvironmentFactory, run_in_thread
from envs.messages import content_text
from envs.rewards.parts import merge_parts
from envs.snapshot import omitted_attributes, thaw_and_watch
from envs.snapshot.render import RENDER_TIMEOUT_S, RenderedSnapshot, render_snapshot
from envs.tools import ToolSpec
from envs.tools.examples import example_arguments
from stream.errors import EnvironmentFailure, PenstockError
from stream.records import Failure, Prompt
from workers.check.program import describe_program, is_program, measure_untouched
from workers.check.report import EnvironmentTrial, Subject, ToolTrial, TurnTrial
from workers.check.scripted import UNLIMITED, ScriptedSampler, play_script
from workers.check.user_code import missing_column, reset_slot
from workers.rollout.agent_endpoint.request_log import RequestLog
from workers.rollout.chat.chat_setup import ChatSetup, load_chat_setups
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.sandboxes import LeasedSandboxes
from workers.rollout.tool_formats.parsing import ToolCall

SAMPLE_TEXT = "I do not know."
"""What the model says where nothing else is given."""


class EpisodeCheck:
    """Plays one episode; after an instance broke, it goes on with a new one.

    Args:
        subject: the environment, in findings.
        trial: receives what the environment does.
        factory: of the environment.
        prompt: row and seed.
        sandboxes: of an environment that opens some.
    """

    def __init__(
        self,
        subject: Subject,
        trial: EnvironmentTrial,
        factory: EnvironmentFactory,
        prompt: Prompt,
        sandboxes: LeasedSandboxes | None = None,
    ) -> None:
        self.snapshot: bytes | None = None
        """The environment at the end of the episode."""
        self._subject, self._trial, self._factory, self._prompt = subject, trial, factory, prompt
        self._checker, self._timeout_s = subject.checker, subject.checker.call_timeout_s
        self._sandboxes = sandboxes
        self._specs = {spec.name: spec for spec in factory.tools}
        self._is_over = False
        self._slot = EnvironmentSlot(prompt.environment or "", factory, CallRunner(anyio.CapacityLimiter(2)))

    async def play(self, turns: Sequence[str | ToolCall] | None) -> bool:
        """Play the episode. Returns whether the environment could be reset.

        Args:
            turns: texts and calls of the model; none: one call of each tool with sample arguments. None: the model
                answers at once.
        """
        try:
            return await self._play(turns)
        finally:
            await self._slot.close()

    async def _play(self, turns: Sequence[str | ToolCall] | None) -> bool:
        observation = await self._reset()
        if isinstance(observation, Failure):
            self._report_reset(observation)
            return False
        self._trial.observation = observation
        for number, turn in enumerate([] if turns is None else turns or self._sample_turns()):
            if self._is_over and turns:
                self._subject.warn(f"the episode was over, so {len(turns) - number} given turns were not played")
                break
            if not await self._renew_if_needed():
                return True
            await (self._say(turn) if isinstance(turn, str) else self._call(turn))
        if await self._renew_if_needed(only_broken=True):
            await self._measure()
            await self._freeze()
        return True

    async def _reset(self) -> Observation | Failure:
        return await reset_slot(self._slot, self._sandboxes, self._prompt, 0, self._timeout_s)

    def _report_reset(self, failure: Failure) -> None:
        checker, prompt, column = self._checker, self._prompt, self._checker.settings.data.prompt
        is_slow = "did not return within" in failure.detail and (
            self._timeout_s < checker.settings.rollout.call_timeout_s
        )
        message = failure.detail.partition(": ")[2]
        remedy = "reset gets the row's fields: give them with --field NAME=VALUE" if checker.is_alone else ""
        if not checker.is_alone:
            message += f" (with the row {prompt.id})"
        if failure.cause and failure.cause.exception == f"KeyError: {column!r}":
            why, remedy = missing_column(checker, column, prompt)
            message += f"; reset is not given it{why}"
        self._subject.add("warning" if is_slow else "error", message, remedy, failure.cause)

    def _sample_turns(self) -> list[str | ToolCall]:
        calls: list[str | ToolCall] = [
            ToolCall(spec.name, example_arguments(spec.schema["function"]["parameters"]), raw="")
            for spec in self._specs.values()
        ]
        return [*calls, SAMPLE_TEXT] if self._factory.responds else calls

    async def _renew_if_needed(self, *, only_broken: bool = False) -> bool:
        """Start a new episode if the last turn ended it, in a new instance if it broke. Returns whether one is on."""
        if not self._slot.needs_replacement and (only_broken or not self._is_over):
            return True
        if self._slot.needs_replacement:
            await self._slot.close()
        observation = await self._reset()
        self._is_over = False
        self._trial.messages.clear()
        if isinstance(observation, Failure):
            self._subject.error(
                f"a new instance, after one broke or was done: {observation.detail}", cause=observation.cause
            )
        return not isinstance(observation, Failure)

    async def _call(self, call: ToolCall) -> None:
        spec = self._specs.get(call.name) or _unknown(call.name)
        trial = ToolTrial(name=call.name, description=spec.description, schema=spec.schema, arguments=call.arguments)
        self._trial.tools.append(trial)
        result = await self._slot.call_tool(call, self._timeout_s)
        function = {"name": call.name, "arguments": call.arguments}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        if isinstance(result, Failure):
            trial.failure = result.detail
            message = f"tool {call.name} broke the environment: {result.detail}; such completions are invalid"
            self._subject.error(message, cause=result.cause)
            return
        trial.reply, trial.is_error = result.text, result.is_error
        self._trial.messages += [called, {"role": "tool", "name": call.name, "content": result.content}]
        if result.parts:
            trial.returned = f"content parts: {', '.join(str(part['type']) for part in result.parts)}"
        elif result.object_type:
            trial.returned = f"an object of type {result.object_type}"
            self._subject.warn(
                f"tool {call.name} returned {trial.returned}; the model reads its str()",
                'return text, plain data, or content parts such as {"type": "image", "image": URL}',
            )
        trial.ends = await self._check_done()

    async def _say(self, text: str) -> None:
        trial, messages = TurnTrial(said=text), self._trial.messages
        self._trial.turns.append(trial)
        messages.append({"role": "assistant", "content": text})
        if not self._factory.responds:
            trial.ends = self._is_over = True
            return
        replies = await self._slot.respond(text, messages, self._timeout_s)
        if isinstance(replies, Failure):
            trial.failure = replies.detail
            message = f"respond broke the environment: {replies.detail}; such completions are invalid"
            self._subject.error(message, cause=replies.cause)
            return
        if replies is None:
            trial.ends = self._is_over = True
            return
        trial.reply = "\n".join(content_text(message["content"]) for message in replies)
        messages += replies
        trial.ends = await self._check_done()

    async def _check_done(self) -> bool:
        done = await self._slot.is_done(self._timeout_s)
        if isinstance(done, Failure):
            self._subject.error(done.detail, cause=done.cause)
            return False
        self._is_over = done
        return done

    async def _measure(self) -> None:
        if not self._factory.has_reward or self._factory.runs_own_loop:
            return
        # Turn rewards count the turn that ends an episode, which calls nothing.
        messages = self._trial.messages
        ends_in_turn = bool(messages) and messages[-1]["role"] == "assistant"
        last = [] if ends_in_turn or self._is_over else [{"role": "assistant", "content": SAMPLE_TEXT}]
        self._trial.parts = await self._slot.reward(self._timeout_s, [*messages, *last])
        self._trial.reward = merge_parts(self._trial.parts)

    async def _freeze(self) -> None:
        frozen = await self._slot.freeze(self._checker.settings.rollout.max_snapshot_bytes, self._timeout_s)
        if isinstance(frozen, Failure):
            self._subject.error(frozen.detail.partition(": ")[2], cause=frozen.cause)
        else:
            await self._inspect_snapshot(frozen)

    async def run_own_loop(self, says: Sequence[str]) -> bool:
        """Let an environment run its own loop with a scripted model, whose turns after these are empty.

        Returns whether the environment could be reset.
        """
        fields, trial = dict(self._prompt.fields), self._trial
        asked = str(fields.pop("prompt", ""))
        messages = self._prompt.messages or [{"role": "user", "content": asked}]
        row = msgspec.structs.replace(self._prompt, messages=messages, fields=fields, group_size=1)
        setup = await anyio.to_thread.run_sync(self._load_chat)
        script = ScriptedSampler(says or [SAMPLE_TEXT])
        if setup is not None:
            script = ScriptedSampler(says or [SAMPLE_TEXT], setup.chat, self._checker.settings.max_model_len)
        limits = msgspec.structs.replace(
            self._checker.settings.rollout, max_tokens=UNLIMITED, max_tokens_per_turn=UNLIMITED
        )
        seen = RequestLog()
        completion = await play_script(
            self._factory, row, script, limits, seen=seen, setup=setup, sandboxes=self._checker.settings.sandboxes
        )
        if is_program(self._factory):
            trial.program = describe_program(self._subject, seen, completion, self._factory, setup)
            if setup is not None:
                self._check_context(script)
            trial.program.untouched_reward = await measure_untouched(self._subject, self._factory, row)
        trial.messages = [*completion.prompt_messages, *completion.messages]
        if completion.failure is not None:
            self._subject.error(f"its own loop failed: {completion.failure.detail}", cause=completion.failure.cause)
            return completion.turns > 0
        trial.parts = completion.parts
        trial.reward = merge_parts(completion.parts) if completion.parts else None
        if completion.truncated:
            self._subject.warn(f"its own loop reached a limit ({completion.truncated}) after {completion.turns} turns")
        if completion.snapshot is not None:
            await self._inspect_snapshot(completion.snapshot)
        return True

    def _load_chat(self) -> ChatSetup | None:
        """Return the chat of the run's model; None if there is none, which the check of the model reports."""
        settings, name = self._checker.settings, self._prompt.environment or ""
        try:
            return load_chat_setups(settings, settings.model.folder, {name: self._factory})[name]
        except Exception:  # noqa: BLE001  (a template is foreign code)
            return None

    def _check_context(self, script: ScriptedSampler) -> None:
        """Report contexts that the run's engine would refuse."""
        settings, longest = self._checker.settings, script.longest
        if self._checker.is_alone or settings.engine.urls or longest < settings.max_model_len:
            return
        self._checker.about(self._subject.name, "engine.max_model_len").error(
            f"the program asks with a context of {longest} tokens, and {settings.max_model_len} leave no room for an "
            "answer",
            f"set it to {longest + settings.rollout.max_tokens_per_turn}, or make the program's prompt shorter",
        )

    async def _inspect_snapshot(self, data: bytes) -> None:
        """Report what a snapshot lacks; in the check of a run, only what its size limit cost it."""
        trial, checker = self._trial, self._checker
        self.snapshot, trial.snapshot_bytes = data, len(data)
        try:
            thawed, too_large = await anyio.to_thread.run_sync(thaw_and_watch, data, self._factory)
        except PenstockError as error:
            self._subject.error_if_alone(f"the snapshot cannot be read back: {error}")
            return
        trial.omitted = dict(_all_omitted(thawed))
        if checker.is_alone:
            for name, reason in trial.omitted.items():
                self._subject.warn(f"attribute {name} is not in snapshots: {reason}; reward functions cannot read it")
            if self._factory.has_render:
                await self._render(data)
        elif too_large.omitted:
            key, max_bytes = "rollout.max_snapshot_bytes", checker.settings.rollout.max_snapshot_bytes
            names = ", ".join(sorted(too_large.omitted))
            message = f"already after reset, {names} exceeds {key} = {max_bytes} and is omitted from snapshots"
            remedy = "raise it, or drop what reward functions do not read in __copy__"
            checker.about(self._subject.name, key).warn(message, remedy)

    async def _render(self, data: bytes) -> None:
        """Render the snapshot once, as `penstock show` and the dashboard do; a failure there costs no completion."""

        def render() -> RenderedSnapshot:
            rendered: RenderedSnapshot = run_in_thread(
                partial(render_snapshot, self._factory, data), RENDER_TIMEOUT_S, self._factory.ref
            )
            return rendered

        try:
            rendered = await anyio.to_thread.run_sync(render)
        except (TimeoutError, EnvironmentFailure) as error:
            rendered = RenderedSnapshot(error=f"render: {error}")
        self._trial.rendered = rendered.text
        if rendered.error:
            self._subject.warn(f"{rendered.error}; pages show this instead of the environment's final state")


def _unknown(name: str) -> ToolSpec:
    schema = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    return ToolSpec(name=name, description="There is no such tool.", schema=schema)


def _all_omitted(snapshot: object, prefix: str = "", depth: int = 4) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the reason of each omitted attribute, nested objects included."""
    for name, reason in omitted_attributes(snapshot).items():
        yield f"{prefix}{name}", reason
    for name, value in getattr(snapshot, "__dict__", {}).items() if depth else ():
        if hasattr(value, "__dict__"):
            yield from _all_omitted(value, f"{prefix}{name}.", depth - 1)
