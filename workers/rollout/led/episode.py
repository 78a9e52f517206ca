"""One completion of an environment that leads the episode itself: it asks our endpoint for every turn of the model."""

import time

from stream.records import Completion, Failure, Prompt
from stream.validity import RolloutReason, TruncationReason
from workers.rollout.ends import measure, new_completion, row_of, timed
from workers.rollout.engine.sampling import Sampler
from workers.rollout.led.endpoint import Endpoint
from workers.rollout.led.recorder import Chats, Recorder
from workers.rollout.slot import Slot
from workers.rollout.tool_formats.turn import ToolFormat
from workers.settings import Rollout


async def play_led(
    prompt: Prompt,
    index: int,
    *,
    endpoint: Endpoint,
    chats: Chats,
    sampler: Sampler,
    slot: Slot,
    limits: Rollout,
    tool_format: ToolFormat,
    at_least: int = 0,
) -> Completion:
    """Have an episode led, and keep what was sampled for it.

    Args:
        prompt: whose fields reach the environment's `reset`.
        index: position within the group; part of the episode's seed.
        endpoint: where the environment asks for turns.
        chats: the model's, by tools.
        sampler: samples tokens.
        slot: the environment, this episode's alone.
        limits: of tokens, turns, time.
        tool_format: how the model writes tool calls.
        at_least: oldest policy version that may sample.

    Raises:
        EngineUnavailableError: no engine answers.
    """
    started = time.perf_counter()
    completion = new_completion(prompt, index)
    recorder = Recorder(completion, chats, sampler, limits, tool_format, at_least, prompt.seed + index, prompt.id)
    with timed(completion, "reset"):
        begun = await slot.reset(row_of(prompt), prompt.seed + index, index, limits.reset_timeout_s)
    if isinstance(begun, Failure):
        completion.failure = begun
    else:
        await _lead(recorder, endpoint, slot, limits)
    if recorder.error is not None:
        raise recorder.error
    completion.rows = recorder.rows()
    await measure(completion, slot, limits)
    completion.seconds["total"] = time.perf_counter() - started
    return completion


async def _lead(recorder: Recorder, endpoint: Endpoint, slot: Slot, limits: Rollout) -> None:
    completion = recorder.completion
    sampling = {"temperature": limits.temperature, "max_tokens": limits.max_tokens_per_turn}
    with endpoint.episode(recorder) as url:
        failed = await slot.drive(url, sampling, limits.wall_clock_s)
    if recorder.failure is not None:  # what the program made of it is no sample of what the policy does
        completion.failure = recorder.failure
    elif completion.truncated is not None:
        pass  # our limit ended it, which the policy brought about; a program that breaks on that is no failed world
    elif isinstance(failed, TruncationReason):
        completion.truncated = failed
    elif failed is not None:
        completion.failure = failed
    elif not completion.turns:
        told = f"{slot.name}: the episode ended without a turn of the model"
        completion.failure = Failure(reason=RolloutReason.ENV_STEP, detail=told)
