"""One episode of an environment that runs its own loop: it asks the endpoint for every turn of the model."""

from envs.contract import Observation
from stream.queue.in_flight import Activity
from stream.records import Completion, Failure, Message, Row
from stream.validity import RolloutReason, TruncationReason
from workers.rollout.agent_endpoint.endpoint import AgentEndpoint
from workers.rollout.agent_endpoint.recorder import Recorder
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.episode_base import BaseEpisode, EpisodeContext, EpisodeEnd


async def run_agent_episode(context: EpisodeContext, slot: EnvironmentSlot, endpoint: AgentEndpoint) -> Completion:
    """Run one episode; see `BaseEpisode.run`.

    Args:
        context: of the episode.
        slot: the context's environment.
        endpoint: where the environment asks for turns.
    """
    return await AgentEpisode(context, slot, endpoint).run()


class AgentEpisode(BaseEpisode):
    """An episode whose turns the environment drives; this worker samples and records them."""

    def __init__(self, context: EpisodeContext, slot: EnvironmentSlot, endpoint: AgentEndpoint) -> None:
        super().__init__(context)
        self._slot, self._endpoint = slot, endpoint
        self._recorder = Recorder(context, self.completion, self.clock)

    def prompt_messages(self, _observation: Observation) -> list[Message]:
        """Return the prompt; the environment's first request replaces it."""
        return self.context.prompt.messages

    async def run_turns(self) -> EpisodeEnd:
        """Run the environment's loop."""
        limits, recorder = self.context.limits, self._recorder
        sampling = {"temperature": limits.temperature, "max_tokens": limits.max_tokens_per_turn}
        self.context.progress.activity = Activity.OWN_LOOP
        end: EpisodeEnd = TruncationReason.WALL_CLOCK
        with self._endpoint.episode(recorder) as url:
            with self.clock, self.clock.tools:  # the program's own time, since it calls the tools
                end = await self._slot.run_episode(url, sampling, 2 * limits.episode_timeout_s)
            if self.clock.is_up:
                end = self.clock.running
        if recorder.error is not None:
            raise recorder.error
        if recorder.end is not None:  # a missing turn or a limit ended it; how the environment coped does not matter
            return recorder.end
        if end is None and not self.completion.turns:
            detail = f"{self._slot.name}: the episode ended without a turn of the model"
            return Failure(reason=RolloutReason.ENV_STEP, detail=detail)
        return end

    def rows(self) -> list[Row]:
        """Return one row per branch of the conversation."""
        return self._recorder.rows()

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return self._recorder.versions()
