"""The first steps of each worker with a record, by the project's own functions, on arbitrary bytes.

The result must be a value: a valid record, or one of the project's errors that blames the record.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import torch

from stream.codec import encode
from stream.errors import DataError, NewerSchemaError, RecordError
from stream.queue.lease import Lease
from stream.records import Group, Span
from stream.trainer.leased_group import DroppedGroup
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Dropped
from tests.chaos.project import END, write_project
from tests.fuzz.samples import VOCABULARY
from workers.role.rewards import load_factories, load_reward_functions
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.engine_client.sampling import SampledTurn, SamplingOptions
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.runs.progress import Progress
from workers.score.worker import score_group
from workers.settings.toml_file import parse_settings
from workers.train.groups.group_checker import GroupChecker
from workers.train.step.batch import collate
from workers.train.step.estimation import estimate_advantages
from workers.train.step.group_checks import mask_batch

_DIARY = Path(__file__).parent / "diary.py"
_VERSION = 7
_TIMEOUT_S = 60.0


class Workers:
    """One worker of each role."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        model = write_project(folder, groups=0, seed=0).model.path
        self._settings = parse_settings(
            {
                "model": {"path": model},
                "data": {"path": str(folder / "prompts.jsonl")},
                "environments": {"diary": f"{_DIARY}:Diary"},
                "rewards": [{"ref": f"{_DIARY}:pages"}],
                "abort": {"max_invalid_fraction": 1.0},
            }
        )
        self._factories = load_factories(self._settings)
        self._functions = load_reward_functions(self._settings, "score")
        self._chat = ChatTokenizer.load(Path(model), {}, None)
        self._ledger = Ledger(folder / "ledger.jsonl")

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Open the environment pool; closes the ledger in the end."""
        try:
            async with EnvironmentPool(self._factories, size=2) as self._pool:
                yield
        finally:
            self._ledger.close()

    async def take(self, payload: bytes, prompt_id: str) -> dict[str, str]:
        """Give a payload to each worker; returns the results by worker.

        Raises:
            Exception: a worker failed in a way that a record must never cause.
        """
        lease = Lease(id="1-0", prompt_id=prompt_id, payload=payload)
        return {"rollout": await self._rollout(lease), "score": await self._score(lease), "train": self._train(lease)}

    async def _rollout(self, lease: Lease) -> str:
        try:
            prompt = lease.prompt()
            one = msgspec.structs.replace(prompt, group_size=1)  # one completion meets whatever all of them meet
            group = await GroupRunner(
                chats={one.environment: ChatSetup(self._chat, TOOL_FORMATS["hermes"])},
                sampler=_Sampler(),
                pool=self._pool,
                limits=self._settings.rollout,
                factories=self._factories,
            ).run(one)
            encode(group)
        except NewerSchemaError:
            return "newer schema"
        except RecordError:
            return "unreadable"
        except DataError:
            return "data at fault"
        return "played"

    async def _score(self, lease: Lease) -> str:
        try:
            group = lease.group()
            await score_group(group, self._functions, self._factories, _TIMEOUT_S)
            encode(group)
        except NewerSchemaError:
            return "newer schema"
        except RecordError:
            return "unreadable"
        return "scored"

    def _train(self, lease: Lease) -> str:
        checker = GroupChecker(self._settings, VOCABULARY, Progress())
        try:
            checked = checker.check(lease.group(), _VERSION)
        except NewerSchemaError:
            return "newer schema"
        except RecordError:
            return "unreadable"
        if isinstance(checked, Dropped | DroppedGroup):
            return "dropped"
        self._check(lease.group())
        return "trained"

    def _check(self, group: Group) -> None:
        """Assert that the learner would receive tensors of the expected shapes, with finite numbers to learn from."""
        batch = collate([group])
        masks = mask_batch(batch, self._settings, _VERSION)
        advantages = estimate_advantages(batch, masks, self._settings)
        shape = batch.tokens_RT.shape
        tables = (batch.sampled_RT, batch.rollout_logprobs_RT, batch.versions_RT, batch.turn_rewards_RT)
        assert all(table.shape == shape for table in (*tables, masks.loss_tokens_RT, advantages.tokens_RT))
        assert bool(((batch.tokens_RT >= 0) & (batch.tokens_RT < VOCABULARY)).all())
        assert bool(((batch.versions_RT >= 0) == batch.sampled_RT).all())
        assert bool(torch.isfinite(batch.rollout_logprobs_RT[masks.loss_tokens_RT]).all())
        assert bool(torch.isfinite(advantages.tokens_RT[masks.loss_tokens_RT]).all())
        assert bool(torch.isfinite(masks.rewards_C).all())


class _Sampler:
    """An engine that always returns the same sample."""

    async def sample(
        self, _prompt_ids: object, _sampling: SamplingOptions, *, min_policy_version: int = 0
    ) -> SampledTurn:
        return SampledTurn([7, END], [-0.5, -0.5], "stop", [Span(min_policy_version, 0, 2)])


@asynccontextmanager
async def workers(folder: Path) -> AsyncIterator[Workers]:
    """Yield workers with a model, an environment and a ledger in this folder."""
    crew = await anyio.to_thread.run_sync(Workers, folder)
    async with crew.at_work():
        yield crew
