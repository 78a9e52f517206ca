"""One completion of an environment that leads the episode itself: it asks our endpoint for every turn of the model."""

import time

from stream.records import Completion, Failure, Prompt
from stream.validity import RolloutReason, TruncationReason
from workers.rollout.agent_endpoint.endpoint import AgentEndpoint
from workers.rollout.agent_endpoint.recorder import ChatsByTools, Recorder
from workers.rollout.engine_client.sampling import Sampler
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.episode_common import measure, new_completion, reset_fields, timed
from workers.rollout.tool_formats.parsed_turn import ToolFormat
from workers.settings import Rollout


async def run_agent_episode(
    prompt: Prompt,
    index: int,
    *,
    endpoint: AgentEndpoint,
    chats: ChatsByTools,
    sampler: Sampler,
    slot: EnvironmentSlot,
    limits: Rollout,
    tool_format: ToolFormat,
    min_policy_version: int = 0,
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
        min_policy_version: oldest policy version that may sample.

    Raises:
        EngineUnavailableError: no engine answers.
    """
    started = time.perf_counter()
    completion = new_completion(prompt, index)
    recorder = Recorder(
        completion, chats, sampler, limits, tool_format, min_policy_version, prompt.seed + index, prompt.id
    )
    with timed(completion, "reset"):
        observation = await slot.reset(reset_fields(prompt), prompt.seed + index, index, limits.call_timeout_s)
    if isinstance(observation, Failure):
        completion.failure = observation
    else:
        await _run_environment(recorder, endpoint, slot, limits)
    if recorder.error is not None:
        raise recorder.error
    completion.rows = recorder.rows()
    await measure(completion, slot, limits)
    completion.seconds["total"] = time.perf_counter() - started
    return completion


async def _run_environment(recorder: Recorder, endpoint: AgentEndpoint, slot: EnvironmentSlot, limits: Rollout) -> None:
    completion = recorder.completion
    sampling = {"temperature": limits.temperature, "max_tokens": limits.max_tokens_per_turn}
    with endpoint.episode(recorder) as url:
        failed = await slot.run_episode(url, sampling, limits.episode_timeout_s)
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
