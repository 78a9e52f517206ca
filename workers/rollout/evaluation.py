"""What a rollout worker has for evaluations, beside what it has for the run's own prompts."""

from msgspec import Struct

from envs.factory import EnvironmentFactory
from stream.errors import RecordError
from stream.queue.evaluation import create_evaluation_streams
from stream.queue.stage import Lease, Stage
from stream.records import Prompt
from workers.rollout.environment_pool import EnvironmentPool
from workers.runtime.concurrency import ConcurrencyLimit
from workers.runtime.context import WorkerContext
from workers.settings import Rollout


class EvaluationRollout(Struct, kw_only=True, eq=False):
    """A worker's means for prompts of an evaluation."""

    stage: Stage
    pool: EnvironmentPool
    """Instances of their own: no episode of an evaluation leaves a trace in one that is trained."""
    limits: Rollout
    concurrency: ConcurrencyLimit

    @classmethod
    async def from_context(
        cls, context: WorkerContext, factories: dict[str, EnvironmentFactory], concurrency: ConcurrencyLimit
    ) -> "EvaluationRollout":
        """Means within a worker's `room`, of which they never take the last place: training goes on."""
        await create_evaluation_streams(context.connection)
        settings = context.settings
        max_groups = settings.evaluation_groups_in_flight(concurrency.limit)
        limits = settings.for_evaluation.rollout
        return cls(
            stage=Stage(context.connection, "eval:prompts", context.consumer, context.retry_policy),
            pool=EnvironmentPool(factories, size=max_groups * limits.group_size),
            limits=limits,
            concurrency=ConcurrencyLimit(max_groups, parent=concurrency if max_groups < concurrency.limit else None),
        )

    @staticmethod
    def read_lease(lease: Lease) -> tuple[Prompt, int]:
        """The prompt, and the policy version that is to sample it.

        Raises:
            RecordError: it is no prompt of an evaluation.
        """
        if lease.evaluated_version is None:
            raise RecordError("it does not say which policy version it is to evaluate")
        return lease.prompt(), lease.evaluated_version
