"""A trainer is killed at policy version 57 and restarted from the checkpoint of step 50, with groups in flight.

Then the engine is restarted. The scenario runs once; each test checks one property of it.
"""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp
import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM

from stream.codec import decode
from stream.connection.run_connection import RunConnection, connect
from stream.operator.status import read_status
from stream.queue.entry_scan import read_payload
from stream.queue.feed import Feed
from stream.records import Group, Row
from tests.e2e.by_hand import Cast, Role, cast, feed, until
from tests.e2e.harness import Project

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

RUN = "versions"
KILLED_AT, KEPT_AT = 57, 50
LATE, AFTER = 3, 2
TOLERANCE = 1e-4


@dataclass(kw_only=True)
class Story:
    """Everything observed during the scenario."""

    project: Project
    models: dict[int, Path] = field(default_factory=dict)
    """Policy version -> its weights at the time of publication."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Every group ever scored, by prompt."""
    scored: Counter[str] = field(default_factory=Counter)
    told: list[int | None] = field(default_factory=list)
    """Versions that the engine reported, one item per change; None while it has no version or is not reachable."""
    left: dict[str, bytes] = field(default_factory=dict)
    """The weights that the killed trainer published last, by file."""
    taken_up: list[tuple[int, int]] = field(default_factory=list)
    """Step and version of each trainer after its start and before its first step."""

    def ledger(self) -> list[dict]:
        return self.project.ledger()

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.project.run_folder / "metrics.jsonl").read_text().splitlines()]

    def weights(self) -> dict[str, bytes]:
        folder = self.project.run_folder / "weights"
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}

    def keep_model(self, version: int) -> None:
        to = self.project.folder / f"model-{version}"
        shutil.copytree(self.project.run_folder / "weights" / f"v{version:06d}", to)
        self.models[version] = to


def _project(folder: Path, model: Path) -> Project:
    project = Project(folder, model)
    project.table["run"]["name"] = RUN
    project.table["rollout"]["group_size"] = 2
    project.table["engine"] = {"max_model_len": 1024, "max_batch_size": 16}
    project.table["train"] = {"batch_size": 1, "save_every": KEPT_AT, "learning_rate": 1e-3}
    project.table["pacing"] = {"max_staleness": LATE}
    project.table["filter"] = {"zero_variance": False}
    project.table["queue"]["lease_s"] = 2.0
    return project


@pytest.fixture(scope="module")
async def story(tmp_path_factory, random_model, redis_url):
    folder = tmp_path_factory.mktemp("versions")
    recorded = Story(project=await anyio.to_thread.run_sync(_project, folder, random_model))
    async with (
        connect(redis_url, RUN, reconnect_s=30.0) as connection,
        cast(folder) as roles,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(_read_scored, connection, recorded)
        await _tell(connection, roles, tasks, recorded, redis_url)
        tasks.cancel_scope.cancel()
    return recorded


async def _tell(connection: RunConnection, roles: Cast, tasks, story: Story, redis_url: str) -> None:
    project = story.project
    file = str(await anyio.to_thread.run_sync(project.write))
    engine = await roles.start(project.command("serve", file, "--port", "0"))
    url = await _address(engine)
    tasks.start_soon(_ask_version, url, story)
    addresses = ("--redis", redis_url, "--engine", url)
    rollout = await roles.start(project.command("rollout", file, *addresses))
    await roles.start(project.command("score", file, "--redis", redis_url))
    trainer = await roles.start(project.command("train", file, *addresses))

    # Step n publishes version n. Everything is trained, so nothing changes when the trainer is killed.
    await feed(connection, *(f"p{i}" for i in range(KILLED_AT)))
    await until(connection, lambda: _at_rest(connection, KILLED_AT), 120)
    trainer.kill()
    await trainer.ended()
    await rollout.drain()
    await anyio.to_thread.run_sync(story.keep_model, KILLED_AT)
    story.left = await anyio.to_thread.run_sync(story.weights)

    # Long completions, partly sampled when the engine is frozen.
    before = await _sampled(url)
    longer = ("--set", "rollout.max_tokens=500", "--set", "rollout.max_tokens_per_turn=500")
    await feed(connection, *(f"late{i}" for i in range(LATE)))
    rollout = await roles.start(project.command("rollout", file, *addresses, *longer))
    with anyio.fail_after(60):
        while await _sampled(url) < before + 30:
            await anyio.sleep(0.005)
    await _post(f"{url}/pause?mode=keep")

    # The step after the checkpoint holds all of them, so that the first new version lasts until then.
    again = KILLED_AT - KEPT_AT
    one_step = ("--set", f"train.batch_size={again + LATE}")
    trainer = await roles.start(project.command("train", file, *addresses, *one_step))
    await until(connection, lambda: _published(connection, KILLED_AT + 1))
    status = await read_status(connection)
    story.taken_up.append((int(status.policy["step"]), status.version))
    await anyio.to_thread.run_sync(story.keep_model, status.version)
    await until(connection, lambda: _at_rest(connection, KILLED_AT + LATE), 120)

    # A new engine at the same address, with the run's initial weights and no version.
    newest = (await read_status(connection)).version
    await anyio.to_thread.run_sync(story.keep_model, newest)
    with anyio.fail_after(60):
        while story.told[-1] != newest:
            await anyio.sleep(0.02)
    engine.kill()
    await engine.ended()
    await roles.start(project.command("serve", file, "--port", url.rpartition(":")[2]))
    await feed(connection, *(f"after{i}" for i in range(AFTER)))
    await Feed(connection, 1000).finish()
    assert await trainer.ended(120) == 0, trainer.said()
    assert await rollout.ended() == 0, rollout.said()


async def _address(engine: Role) -> str:
    await engine.says("listening on ")
    output = await anyio.to_thread.run_sync(engine.said)
    return output.partition("listening on ")[2].split()[0]


async def _at_rest(connection: RunConnection, trained: int) -> bool:
    status = await read_status(connection)
    return status.counts.get("trained", 0) == trained and status.outstanding == 0


async def _published(connection: RunConnection, version: int) -> bool:
    return (await read_status(connection)).version >= version


async def _sampled(url: str) -> int:
    """Return how many tokens the engine has sampled so far."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("vllm:generation_tokens_total"))


async def _post(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        assert response.status == 200


async def _read_scored(connection: RunConnection, story: Story) -> None:
    """Copy scored groups before a checkpoint deletes them; reads without a consumer group do not affect the run."""
    last = "0"
    while True:
        result = await connection.redis.xread({connection.key("scored"): last}, block=1000)
        for entry, _ in result[0][1] if result else ():
            last = entry
            group = decode(await read_payload(connection, "scored", entry.decode()), Group)
            story.groups[group.prompt.id] = group
            story.scored[group.prompt.id] += 1


async def _ask_version(url: str, story: Story) -> None:
    while True:
        version = None
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{url}/weight_info") as response:
                text = (await response.json())["weight_version"]
                version = None if text is None else int(text)
        except (aiohttp.ClientError, OSError):
            pass
        if not story.told or story.told[-1] != version:
            story.told.append(version)
        await anyio.sleep(0.02)


def versions(row: Row) -> list[int]:
    """Return the policy version of each sampled token."""
    of = {i: span.version for span in row.spans for i in range(span.start, span.end)}
    return [of[i] for start, end in row.sampled_ranges for i in range(start, end)]


def forward(model, row: Row) -> list[float]:
    """Return the log-probs of the row's sampled tokens, teacher-forced."""
    ids = torch.tensor([[*row.prompt, *row.tokens]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
    places = [len(row.prompt) + i for start, end in row.sampled_ranges for i in range(start, end)]
    return [logprobs[place - 1, ids[0, place]].item() for place in places]


def rows(story: Story, prefix: str) -> list[Row]:
    results = [g for prompt, g in story.groups.items() if prompt.startswith(prefix)]
    return [row for group in results for c in group.completions for row in c.rows]


def furthest(story: Story, row: Row, version: int, folder: Path) -> tuple[int, float]:
    """Return how many tokens of `version` a row has, and the largest log-prob difference between engine and model."""
    logprobs = forward(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), row)
    pairs = zip(versions(row), logprobs, row.sampled_logprobs, strict=True)
    apart = [abs(a - b) for v, a, b in pairs if v == version]
    return len(apart), max(apart, default=0.0)


async def test_the_scenario_happens_as_planned(story):
    assert story.taken_up == [(KEPT_AT, KILLED_AT + 1)]
    assert len(story.ledger()) == KILLED_AT + LATE + AFTER
    assert set(story.scored.values()) == {1}, "nobody rolled a group out again"
    crossing = [row for row in rows(story, "late") if {KILLED_AT, KILLED_AT + 1} <= set(versions(row))]
    assert crossing, "no completion was in flight over the resume"


async def test_no_version_number_is_used_for_two_policies(story):
    steps: dict[int, set[int]] = {}
    for line in story.ledger():
        steps.setdefault(line["version"], set()).add(line["step"])
    assert all(len(of) == 1 for of in steps.values()), "one policy trained on in one step, and then was another"
    assert sorted(steps) == [*range(KEPT_AT), KILLED_AT + 1, KILLED_AT + 2]
    numbers = [version for version in story.told if version is not None]
    assert all(a < b for a, b in pairwise(numbers) if a != b)
    assert numbers[-1] >= KILLED_AT + 2


async def test_the_killed_trainers_weight_folders_are_not_overwritten(story):
    now = story.weights()
    assert all(now.get(name, content) == content for name, content in story.left.items())
    first = {int(name.split("/")[0][1:]) for name in now.keys() - story.left.keys()}
    assert min(first) > KILLED_AT


async def test_no_token_is_newer_than_the_policy_that_trained_on_it(story):
    at = {line["prompt"]: line["version"] for line in story.ledger()}
    ages = [
        at[prompt] - v for prompt, g in story.groups.items() for c in g.completions for r in c.rows for v in versions(r)
    ]
    assert min(ages) == 0
    staleness = [
        (line["staleness/mean"], line["staleness/max"]) for line in story.metrics() if "staleness/mean" in line
    ]
    assert len(staleness) == KEPT_AT + 2
    assert all(0 <= mean <= most for mean, most in staleness)


async def test_samples_of_the_new_version_come_from_the_checkpoint(story):
    kept = story.project.run_folder / "checkpoints" / f"step-{KEPT_AT:06d}" / "model"
    counted, told_apart = 0, 0.0
    for row in rows(story, "late"):
        new, apart = furthest(story, row, KILLED_AT + 1, kept)
        assert apart <= TOLERANCE
        counted += new
        told_apart = max(told_apart, furthest(story, row, KILLED_AT + 1, story.models[KILLED_AT])[1])
    assert counted > 0
    assert told_apart > 100 * TOLERANCE, "version 57 would have passed for it"


async def test_groups_in_flight_during_a_resume_name_the_version_of_each_token(story):
    assert {v for row in rows(story, "late") for v in versions(row)} <= {KILLED_AT, KILLED_AT + 1}
    for row in rows(story, "late"):
        assert furthest(story, row, KILLED_AT, story.models[KILLED_AT])[1] <= TOLERANCE


async def test_a_restarted_engine_has_the_current_version_before_its_first_request(story):
    newest = KILLED_AT + 2
    assert None in story.told[story.told.index(newest) :]
    result = rows(story, "after")
    assert len(result) == 2 * AFTER
    for row in result:
        assert set(versions(row)) == {newest}
        assert furthest(story, row, newest, story.models[newest])[1] <= TOLERANCE
