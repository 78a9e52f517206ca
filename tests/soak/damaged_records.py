"""Corrupt records in many ways, and check that decoders and workers handle them.

    python -m tests.soak.damaged_records --records 1000000 --seed S --json

A record with altered bytes must be refused; one with a recomputed checksum must be refused too, or be a record that a
worker can process. Any other result is printed with the bytes, and the exit code is 1.
"""

import argparse
import base64
import json
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec
import torch

from stream.codec import decode, encode
from stream.errors import DataError, NewerSchemaError, RecordError
from stream.queue.lease import Lease
from stream.records import SCHEMA, Group, Prompt, Span
from stream.trainer.leased_group import DroppedGroup
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Dropped
from tests.soak import record_samples
from tests.soak.corruption import BYTES, HEADER, TREES, seal, spoil_tree
from tests.soak.ends import VOCABULARY
from tests.soak.project import END, write_project
from tests.soak.record_samples import Samples
from workers.role import log_setup as logs
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

_DIARY = record_samples.__file__
_VERSION = 7
_TIMEOUT_S = 60.0
_POOL = 200
"""Records of each kind that are corrupted before new ones are made."""
_FAILURES_TOLD = 20


class Workers:
    """The first steps of one worker of each role with a record, by the project's own functions, on arbitrary bytes.

    The result must be a value: a valid record, or one of the project's errors that blames the record.
    """

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


class Fuzz:
    """Counts the results by kind of corruption."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.outcomes: dict[str, Counter[str]] = {}
        self.failures: list[dict[str, str]] = []
        self._pool: list[tuple[str, bytes]] = []

    async def run(self, records: int, crew: Workers) -> None:
        """Corrupt this many records, with each way in turn."""
        ways = [(way.__name__, way, False) for way in BYTES] + [
            (way.__name__, way, True) for way in (*BYTES[:-1], *TREES)
        ]
        for number in range(records):
            if number % (_POOL * len(ways)) == 0:
                await self._refill(crew)
            name, way, sealed = ways[number % len(ways)]
            (prompt_id, payload), (_, other) = self.chance.choice(self._pool), self.chance.choice(self._pool)
            if not sealed:
                altered = way(payload, other, self.chance)
                if altered not in (payload, other):
                    self._note(name, altered, self._is_refused(altered))
            else:
                body = payload[HEADER:]
                spoilt = (
                    spoil_tree(body, way, self.chance) if way in TREES else way(payload, other, self.chance)[HEADER:]
                )
                newer = self.chance.random() < 0.01
                await self._give(f"sealed {name}", seal(spoilt, SCHEMA + newer), prompt_id, crew)

    async def _refill(self, crew: Workers) -> None:
        """Make new records; unaltered, each must be accepted."""
        samples = Samples(self.chance)
        made = [record for _ in range(_POOL) for record in (samples.prompt(), samples.group())]
        self._pool = []
        for record in made:
            prompt_id = record.id if isinstance(record, Prompt) else record.prompt.id
            self._pool.append((prompt_id, encode(record)))
            await self._give("as they were", self._pool[-1][1], prompt_id, crew)

    def _is_refused(self, payload: bytes) -> str:
        for kind in (Prompt, Group):
            try:
                decode(payload, kind)
            except NewerSchemaError:
                return "taken for a newer record"
            except RecordError:
                continue
            except BaseException:  # any exception is a finding
                return f"raised: {traceback.format_exc(limit=-3)}"
            return f"taken for a {kind.__name__}"
        return "refused"

    async def _give(self, name: str, payload: bytes, prompt_id: str, crew: Workers) -> None:
        try:
            result = await crew.take(payload, prompt_id)
        except Exception:  # any exception is a finding
            self._note(name, payload, f"raised: {traceback.format_exc(limit=-4)}")
            return
        for worker, outcome in result.items():
            self._note(name, payload, f"{worker}: {outcome}")

    def _note(self, name: str, payload: bytes, outcome: str) -> None:
        wrong = outcome.startswith(("raised", "taken"))
        self.outcomes.setdefault(name, Counter())["wrong" if wrong else outcome] += 1
        if wrong and len(self.failures) < _FAILURES_TOLD:
            self.failures.append({"way": name, "found": outcome, "payload": base64.b64encode(payload).decode()})


def fuzz(records: int, seed: int) -> dict[str, Any]:
    """Corrupt this many records; returns the report."""
    result = Fuzz(seed)

    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
            async with workers(Path(folder)) as crew:
                await result.run(records, crew)

    began = time.monotonic()
    anyio.run(main)
    return {
        "records": records,
        "seed": seed,
        "wrong": sum(counts["wrong"] for counts in result.outcomes.values()),
        "seconds": round(time.monotonic() - began, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "outcomes": {name: dict(sorted(counts.items())) for name, counts in sorted(result.outcomes.items())},
        "failures": result.failures,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, count, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    logs.configure_logging("fuzz", level="critical")
    report = fuzz(options.records, options.seed)
    print(json.dumps(report, indent=None if options.json else 4), flush=True)
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
