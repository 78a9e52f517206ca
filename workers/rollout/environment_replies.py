"""What an environment says after a turn: tool results, or its `respond`; and the limits that end an episode."""

from stream.queue.in_flight import Activity
from stream.records import Completion, Failure, Message, ToolRun
from stream.validity import TruncationReason
from workers.rollout.episode_base import EnvironmentContext, timed
from workers.rollout.episode_clock import EpisodeClock
from workers.rollout.messages import call_id, tool_message
from workers.rollout.tool_formats.parsed_turn import ParsedTurn
from workers.rollout.tool_result import ToolResult, truncate_result


class EnvironmentReplies:
    """Runs the calls of one episode's turns, or has the environment answer them, and counts both in its completion.

    Args:
        context: of the episode.
        completion: receives messages and counts.
        clock: of the episode.
    """

    def __init__(self, context: EnvironmentContext, completion: Completion, clock: EpisodeClock) -> None:
        self._slot, self._limits, self._progress = context.slot, context.limits, context.progress
        self._completion, self._clock = completion, clock
        self._generated_ids = 0
        self._calls_refused = False

    def new_call_id(self) -> str:
        """Make an id for a call that has none."""
        self._generated_ids += 1
        return call_id(self._generated_ids)

    async def after(self, parsed: ParsedTurn, text: str) -> list[Message] | Failure | None:
        """Return what follows a turn, which is then part of the completion's messages; None: the episode is over.

        Args:
            parsed: the turn.
            text: what `respond` reads of it: its text without the reasoning.
        """
        with timed(self._completion, "tools"), self._clock.tools:
            replies = await self._replies(parsed, text)
            if replies is None or isinstance(replies, Failure):
                return replies
            self._completion.messages += replies
            done = self._slot is not None and await self._slot.is_done(self._limits.call_timeout_s)
            return done if isinstance(done, Failure) else None if done else replies

    def limit_reached(self) -> TruncationReason | None:
        """Return the limit that denies the model another turn. A limit allows exactly its number."""
        if self._calls_refused:
            return TruncationReason.TOOL_CALLS
        if self._completion.tool_errors > self._limits.max_tool_errors:
            return TruncationReason.TOOL_ERRORS
        if self._completion.turns >= self._limits.max_turns:
            return TruncationReason.MAX_TURNS
        return None

    async def _replies(self, parsed: ParsedTurn, text: str) -> list[Message] | Failure | None:
        if parsed.calls or parsed.errors:
            return await self._call_tools(parsed)
        if self._slot is None or not self._slot.responds:
            return None
        self._progress.activity = Activity.RESPOND
        messages = await self._slot.respond(text, self._completion.messages, self._limits.call_timeout_s)
        if messages is None or isinstance(messages, Failure):
            return messages
        return [
            message | {"content": truncate_result(message["content"], self._limits.max_tokens)} for message in messages
        ]

    async def _call_tools(self, turn: ParsedTurn) -> list[Message] | Failure:
        """Run the calls that the limit allows, concurrently; return their results in the order of the calls."""
        completion = self._completion
        allowed = turn.calls[: max(0, self._limits.max_tool_calls - completion.tool_calls)]
        self._calls_refused = len(allowed) < len(turn.calls)
        completion.tool_calls += len(allowed)
        results: list[ToolResult | Failure] = []
        if self._slot is not None and allowed:
            self._progress.calls, self._progress.activity = allowed, Activity.TOOL
            results = await self._slot.call_tools(allowed, self._limits.call_timeout_s)
        messages, runs = [], []
        for call, result in zip(allowed, results, strict=True):
            if isinstance(result, Failure):
                return result
            content = truncate_result(result.content, self._limits.max_tokens)
            messages.append(tool_message(content, call.id, call.name))
            runs.append(ToolRun(result.seconds, result.is_error, result.cause))
        for text in turn.errors:
            messages.append(tool_message(text, self.new_call_id()))
            runs.append(ToolRun(0.0, is_error=True))
        completion.tool_errors += sum(run.is_error for run in runs)
        completion.tool_runs += runs
        return messages
