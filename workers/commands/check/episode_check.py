"""Play given turns, or sample calls, in an environment, and report what it answered, its reward and its snapshot."""

from collections.abc import Iterator, Sequence
from functools import partial

import anyio
import msgspec

from envs.factory import EnvironmentFactory, run_in_thread
from envs.messages import content_text
from envs.rewards.merge import merge_parts
from envs.snapshot import omitted_attributes, thaw
from envs.snapshot.rendering import RENDER_TIMEOUT_S, RenderedSnapshot, render_snapshot
from envs.tools import ToolSpec
from envs.tools.examples import example_arguments
from stream.errors import EnvironmentFailure, PenstockError
from stream.records import Failure, Prompt
from workers.commands.check.check_report import EnvironmentReport, ToolTrial, TurnTrial
from workers.rollout.agent_endpoint.endpoint import serve_endpoint
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats.parsed_turn import ToolCall
from workers.rollout.tool_formats.registry import TOOL_FORMATS
from workers.settings import Rollout
from workers.testing.scripted_sampler import ScriptedSampler, scripted_chat

SAMPLE_TEXT = "I do not know."
"""What the model says where nothing else is given."""
_MANY_TOKENS = 10_000_000


class EpisodeCheck:
    """Plays one episode; after an instance broke, it goes on with a new one.

    Args:
        report: receives what is found.
        factory: of the environment.
        slot: its slot.
        limits: deadlines.
    """

    def __init__(
        self, report: EnvironmentReport, factory: EnvironmentFactory, slot: EnvironmentSlot, limits: Rollout
    ) -> None:
        self._report, self._factory, self._slot = report, factory, slot
        self._timeout_s, self._max_snapshot_bytes = limits.call_timeout_s, limits.max_snapshot_bytes
        self._specs = {spec.name: spec for spec in factory.tools}
        self._is_over = False

    async def run(self, turns: Sequence[str | ToolCall] = ()) -> bool:
        """Play the episode. Returns whether the environment could be reset."""
        report, slot = self._report, self._slot
        observation = await slot.reset(report.fields, seed=0, index=0, timeout_s=self._timeout_s)
        if isinstance(observation, Failure):
            remedy = "reset gets the row's fields: give them with --field name=value"
            if "'prompt'" in observation.detail:
                remedy = (
                    "the column with the prompt is what the model reads: a run gives it to reset, too, with "
                    'data.columns = { prompt = "prompt" }, and here --field prompt=TEXT does'
                )
            report.errors.append(f"{observation.detail}; {remedy}")
            return False
        report.observation = observation
        for number, turn in enumerate(turns or self._sample_turns()):
            if self._is_over and turns:
                report.warnings.append(f"the episode was over, so {len(turns) - number} given turns were not played")
                break
            if not await self._renew_if_needed():
                return True
            await (self._say(turn) if isinstance(turn, str) else self._call(turn))
        if await self._renew_if_needed(only_broken=True):
            await self._measure()
            await self._freeze()
        return True

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
        found = await self._slot.reset(self._report.fields, seed=0, index=0, timeout_s=self._timeout_s)
        self._is_over = False
        self._report.messages.clear()
        if isinstance(found, Failure):
            self._report.errors.append(f"a new instance, after one broke or was done: {found.detail}")
        return not isinstance(found, Failure)

    async def _call(self, call: ToolCall) -> None:
        report, spec = self._report, self._specs.get(call.name) or _unknown(call.name)
        trial = ToolTrial(name=call.name, description=spec.description, schema=spec.schema, arguments=call.arguments)
        report.tools.append(trial)
        result = await self._slot.call_tool(call, self._timeout_s)
        function = {"name": call.name, "arguments": call.arguments}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        if isinstance(result, Failure):
            trial.failure = result.detail
            report.errors.append(
                f"tool {call.name} broke the environment: {result.detail}; such completions are invalid"
            )
            return
        trial.reply, trial.is_error = result.text, result.is_error
        report.messages += [called, {"role": "tool", "name": call.name, "content": result.content}]
        if result.parts:
            trial.returned = f"content parts: {', '.join(str(part['type']) for part in result.parts)}"
        elif result.object_type:
            trial.returned = f"an object of type {result.object_type}"
            report.warnings.append(
                f"tool {call.name} returned {trial.returned}; the model reads its str(): return text, plain data, or "
                'content parts such as {"type": "image", "image": URL}'
            )
        trial.ends = await self._check_done()

    async def _say(self, text: str) -> None:
        report = self._report
        trial = TurnTrial(said=text)
        report.turns.append(trial)
        report.messages.append({"role": "assistant", "content": text})
        if not self._factory.responds:
            trial.ends = self._is_over = True
            return
        replies = await self._slot.respond(text, report.messages, self._timeout_s)
        if isinstance(replies, Failure):
            trial.failure = replies.detail
            report.errors.append(f"respond broke the environment: {replies.detail}; such completions are invalid")
            return
        if replies is None:
            trial.ends = self._is_over = True
            return
        trial.reply = "\n".join(content_text(message["content"]) for message in replies)
        report.messages += replies
        trial.ends = await self._check_done()

    async def _check_done(self) -> bool:
        done = await self._slot.is_done(self._timeout_s)
        if isinstance(done, Failure):
            self._report.errors.append(done.detail)
            return False
        self._is_over = done
        return done

    async def _measure(self) -> None:
        report = self._report
        if not self._factory.has_reward:
            return
        # Turn rewards count the turn that ends an episode, which calls nothing.
        ends_in_turn = bool(report.messages) and report.messages[-1]["role"] == "assistant"
        last = [] if ends_in_turn or self._is_over else [{"role": "assistant", "content": ""}]
        report.parts = await self._slot.reward(self._timeout_s, [*report.messages, *last])
        report.reward = merge_parts(report.parts)

    async def _freeze(self) -> None:
        data = await self._slot.freeze(self._max_snapshot_bytes, self._timeout_s)
        if isinstance(data, Failure):
            self._report.errors.append(data.detail)
        else:
            await inspect_snapshot(self._report, self._factory, data)


async def check_own_loop(
    report: EnvironmentReport, factory: EnvironmentFactory, limits: Rollout, says: Sequence[str]
) -> bool:
    """Let an environment run its own loop with a scripted model. Returns whether it could be reset.

    Args:
        report: receives what is found.
        factory: of the environment.
        limits: of the episode.
        says: the model's turns; later ones are empty.
    """
    limits = msgspec.structs.replace(limits, max_tokens=_MANY_TOKENS, max_tokens_per_turn=_MANY_TOKENS)
    prompt = Prompt(
        id="check:0:0",
        messages=[{"role": "user", "content": str(report.fields.get("prompt", ""))}],
        fields={name: value for name, value in report.fields.items() if name != "prompt"},
        environment=report.ref,
    )
    chat = await anyio.to_thread.run_sync(scripted_chat)
    async with (
        EnvironmentPool({report.ref: factory}, size=1) as pool,
        serve_endpoint("127.0.0.1") as endpoint,
    ):
        runner = GroupRunner(
            chats={report.ref: ChatSetup(chat, TOOL_FORMATS["hermes"])},
            sampler=ScriptedSampler(says or [SAMPLE_TEXT]),
            pool=pool,
            limits=limits,
            factories={report.ref: factory},
            endpoint=endpoint,
        )
        (completion,) = (await runner.run(prompt)).completions
    report.messages = [*completion.prompt_messages, *completion.messages]
    if completion.failure is not None:
        report.errors.append(f"its own loop failed: {completion.failure.detail}")
        return completion.turns > 0
    report.parts = completion.parts
    report.reward = merge_parts(completion.parts) if completion.parts else None
    if completion.truncated:
        report.warnings.append(f"its own loop reached a limit ({completion.truncated}) after {completion.turns} turns")
    if completion.snapshot is not None:
        await inspect_snapshot(report, factory, completion.snapshot)
    return True


async def inspect_snapshot(report: EnvironmentReport, factory: EnvironmentFactory, data: bytes) -> None:
    """Report a snapshot's size, and what it lacks."""
    report.snapshot_bytes = len(data)
    try:
        report.omitted = dict(_all_omitted(await anyio.to_thread.run_sync(thaw, data, factory)))
    except PenstockError as error:
        report.errors.append(f"the snapshot cannot be read back: {error}")
    if factory.has_render:
        await _render(report, factory, data)
    for name, reason in report.omitted.items():
        report.warnings.append(f"attribute {name} is not in snapshots: {reason}; reward functions cannot read it")


async def _render(report: EnvironmentReport, factory: EnvironmentFactory, data: bytes) -> None:
    """Render the snapshot once, as `penstock show` and the dashboard do; a failure there costs no completion."""

    def render() -> RenderedSnapshot:
        found: RenderedSnapshot = run_in_thread(partial(render_snapshot, factory, data), RENDER_TIMEOUT_S, report.ref)
        return found

    try:
        rendered = await anyio.to_thread.run_sync(render)
    except (TimeoutError, EnvironmentFailure) as error:
        rendered = RenderedSnapshot(error=f"render: {error}")
    report.rendered = rendered.text
    if rendered.error:
        report.warnings.append(f"{rendered.error}; pages show this instead of the environment's final state")


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
