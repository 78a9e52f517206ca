"""The trainer's part in evaluations: it begins them, holds publications meanwhile, and writes down what came of them.

::

    publish v ──► due? examine v ──► train the step that follows ──► hold: wait until v is sampled ──► publish v+1
                                                                        └─ conclude, once all is scored

The engines have version v for as long as the evaluation of v is sampled, so its spans name v alone. Nothing that it
waits for waits for the trainer: prompts of an evaluation need no place in pacing. Still each wait is bounded, by
`eval.hold_s` without anything new; what is sampled after that is counted as mixed.

A trainer that was killed begins from a checkpoint, under a new version number: the evaluation that was under way is
given up, and done again where the step that the weights are of has no line yet.
"""

import time
from collections.abc import Callable

import anyio
import msgspec
import structlog

from stream.evaluation import Gauge, environments, gauge, make_streams, outcomes
from stream.link import LONGEST_WAIT_S, Link
from stream.training import Tenure
from workers.settings import Settings
from workers.train.evaluation.figures import Evaluation, Evaluations, evaluation

log = structlog.get_logger()

_REST_S = 0.01
"""Between two looks: a run that goes on wakes many times a second."""


class Evaluating:
    """The trainer's part in evaluations.

    Args:
        settings: of the run.
        tenure: the right to train it.
        book: what was found so far; None where nothing is evaluated.
        stopping: set when the trainer is asked to stop: then nothing is waited for.
    """

    def __init__(self, settings: Settings, tenure: Tenure, book: Evaluations | None, stopping: anyio.Event) -> None:
        self._settings = settings.eval
        self._publish_every = settings.train.publish_every
        self._of = settings.held_out
        self._tenure = tenure
        self._book = book
        self._stopping = stopping
        self._under_way: tuple[int, int, float] | None = None
        """Version, step and monotonic time of the beginning."""
        self._overtaken = False
        """It was held for in vain."""
        self._news: Evaluation | None = None

    @property
    def _link(self) -> Link:
        return self._tenure.link

    async def start(self) -> None:
        """Give up what a trainer before us had begun: its version is not ours."""
        if self._book is not None:
            await make_streams(self._link)
            await self._tenure.conclude(_latest(self._book))

    async def published(self, version: int, step: int, *, last: bool = False) -> None:
        """Begin an evaluation of a version that the engines have now, if one is due."""
        if not self._due(step, last) or self._stopping.is_set():
            return
        await self._conclude()
        since = time.monotonic()
        while after := await self._tenure.examine(version, step, self._of):
            if self._stopping.is_set():
                return
            left_s = self._settings.hold_s - (time.monotonic() - since)
            if left_s <= 0:
                log.error("evaluation.skipped", version=version, why="no feeder has brought the held-out prompts")
                return
            await self._wait(after, left_s)
        self._under_way, self._overtaken = (version, step, since), False
        log.info("evaluation.begun", version=version, step=step)

    async def hold(self) -> None:
        """Before a publication: wait until the evaluation under way has been sampled."""
        if self._under_way is None or self._overtaken:
            return
        self._overtaken = not await self._until(self._under_way, lambda seen: not seen.unsampled)
        if self._overtaken and not self._stopping.is_set():
            log.warning("evaluation.overtaken", version=self._under_way[0], hold_s=self._settings.hold_s)

    async def look(self) -> None:
        """Write down the evaluation under way, if all of it has come."""
        if self._under_way is None:
            return
        now = await gauge(self._link)
        if now.version == self._under_way[0] and not now.open:
            await self._conclude()

    async def end(self, version: int, step: int) -> None:
        """The run is over: evaluate its last policy, if that has not been done, and wait for what came of it."""
        await self.published(version, step, last=True)
        await self._conclude()

    def is_due_at_the_end(self, step: int) -> bool:
        """Whether the policy of this step is yet to be evaluated, if it is the last."""
        return self._due(step, last=True)

    def metrics(self) -> dict[str, float]:
        """Of an evaluation that was concluded since this was last asked."""
        news, self._news = self._news, None
        return news.metrics() if news is not None else {}

    def _due(self, step: int, last: bool) -> bool:
        if self._book is None:
            return False
        done = [line.step for line in self._book.lines]
        done += [self._under_way[1]] if self._under_way is not None else []
        if last:
            return step not in done
        publication = step // self._publish_every
        return publication % self._settings.every == 0 and publication not in {s // self._publish_every for s in done}

    async def _conclude(self) -> None:
        """Wait until all of the evaluation under way has come, within bounds, and write it down."""
        if self._under_way is None or self._book is None:
            return
        whole = await self._until(self._under_way, lambda seen: not seen.open)
        if self._stopping.is_set() and not whole:
            return
        version, step, began = self._under_way
        prompts = await environments(self._link)
        found = await outcomes(self._link)
        score, by_environment = await anyio.to_thread.run_sync(
            evaluation, found, prompts, "dead" if whole else "missing"
        )
        line = Evaluation(
            version=version,
            step=step,
            time=time.time(),
            seconds=time.monotonic() - began,
            overall=score,
            environments=by_environment,
        )
        await anyio.to_thread.run_sync(self._book.append, line)
        self._under_way, self._news = None, line
        await self._tenure.conclude(_latest(self._book))
        log.info("evaluation.concluded", version=version, step=step, mean=score.mean_valid, mixed=score.mixed)

    async def _until(self, under_way: tuple[int, int, float], done: Callable[[Gauge], bool]) -> bool:
        """Wait for it; False where nothing new came for `hold_s`, or a stop was asked for."""
        version, step, _ = under_way
        seen: tuple[int, int] | None = None
        last = time.monotonic()
        while True:
            now = await gauge(self._link)
            if now.version != version:
                log.warning("evaluation.forgotten", version=version, server_has=now.version)
                await self._tenure.examine(version, step, self._of)
            elif done(now):
                return True
            if now.version == version and (now.unsampled, now.open) != seen:
                seen, last = (now.unsampled, now.open), time.monotonic()
            left_s = self._settings.hold_s - (time.monotonic() - last)
            if left_s <= 0 or self._stopping.is_set():
                return False
            await self._wait(now.wake, left_s)

    async def _wait(self, after: str, at_most_s: float) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when, self._stopping, tasks.cancel_scope)
            await self._link.wait(after, max(0.001, min(at_most_s, LONGEST_WAIT_S)))
            await anyio.sleep(_REST_S)
            tasks.cancel_scope.cancel()


def _latest(book: Evaluations) -> bytes:
    return msgspec.json.encode(book.last) if book.last is not None else b""


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
