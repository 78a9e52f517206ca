"""Sandboxes of episodes: opened in `reset`, removed at the end; what happens to them decides about the completion."""

from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from envs.sandboxes.contract import FailureKind, SandboxFailure, SandboxSpec
from envs.snapshot import omitted_attributes, thaw
from stream.queue.sandboxes import read_sandbox_counts
from stream.records import Prompt
from stream.validity import Measured, RolloutReason, Unmeasured
from tests.cases.sandbox_place import reached, serve_place
from tests.unit.test_episode import Scripted, call, factory_of, make_chat
from workers.check.environment import EnvironmentCheck
from workers.check.report import Checker
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.sandbox_host import SandboxHost, SandboxOwner, load_provider
from workers.rollout.sandboxes import episode_sandboxes
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.rollout.tool_formats.parsing import ToolCall
from workers.settings import RolloutSettings, SandboxSettings, Settings

PROVIDER = "tests.cases.sandbox_place:PlaceProvider"
SPEC = SandboxSpec(memory_mb=64, disk_mb=64, max_life_s=600)


class Boxed:
    """Notes in its sandbox what the model says, and counts its notes for a reward."""

    async def reset(self, sandboxes, purpose="agent"):
        self.sandboxes = sandboxes
        self.sandbox = await sandboxes.open(SPEC, purpose=purpose)

    async def note(self, text: str) -> str:
        await self.sandbox.write({text: b"x"})
        return "noted"

    def note_now(self, text: str) -> str:
        return self.sandbox.run(["write", text, "x"], timeout_s=1).stdout.decode()

    async def careless(self, text: str) -> str:
        try:
            await self.sandbox.write({text: b"x"})
        except SandboxFailure:
            return "never mind"
        return "noted"

    async def end(self) -> str:
        return str(await self.sandbox.exec(["end"], timeout_s=1))

    async def get_reward(self):
        return float(len(await self.sandbox.read("a", 10)))


@pytest.fixture
def socket(tmp_path):
    with serve_place(tmp_path) as path:
        yield path


@pytest.fixture
async def place(socket):
    async with reached(socket) as provider:
        yield provider


def settings_of(socket, **changes):
    return SandboxSettings(provider=PROVIDER, address=str(socket), create_timeout_s=5, call_timeout_s=2, **changes)


@asynccontextmanager
async def leased(pipe, socket, **changes):
    """Yield a host of the run, and the lease of a claimed prompt."""
    await pipe.feed("a")
    worker = pipe.stage("prompts")
    (lease,) = (await worker.claim(1)).leases
    async with SandboxHost.open(settings_of(socket, **changes), pipe.connection) as host:
        yield host, SandboxOwner(worker, lease)


async def played(host, owner, turns, *, env=Boxed, size=1, **fields):
    """Play a group, and return its completions."""
    factory = factory_of(env)
    prompt = Prompt(
        id="a", messages=[{"role": "user", "content": "?"}], environment="box", group_size=size, fields=fields
    )
    async with EnvironmentPool({"box": factory}, size=size) as pool:
        group = await GroupRunner(
            chats={"box": ChatSetup(make_chat(), TOOL_FORMATS["hermes"])},
            sampler=Scripted(turns),
            pool=pool,
            limits=RolloutSettings(),
            factories={"box": factory},
            sandboxes=host,
        ).run(prompt, owner=owner)
    return group.completions


async def test_an_episode_has_a_sandbox_until_it_ends(pipe, socket, place):
    async with leased(pipe, socket) as (host, owner):
        (completion,) = await played(host, owner, [call("note", '{"text": "a"}'), "done"])
        assert [part.reward for part in completion.parts] == [Measured(1.0)]
    counts = await place.ask(do="counts")
    assert (counts["created"], counts["removed"]) == (1, 1)
    assert (await read_sandbox_counts(pipe.connection)).stopped == 1


async def test_a_snapshot_has_no_sandbox_and_nothing_of_the_worker(pipe, socket):
    async with leased(pipe, socket) as (host, owner):
        (completion,) = await played(host, owner, [call("note", '{"text": "a"}'), "done"])
    omitted = omitted_attributes(thaw(completion.snapshot, factory_of(Boxed)))
    assert omitted == dict.fromkeys(("sandbox", "sandboxes"), "a sandbox ends with its episode")
    assert len(completion.snapshot) < 500


async def test_a_synchronous_tool_runs_commands(pipe, socket):
    async with leased(pipe, socket) as (host, owner):
        (completion,) = await played(host, owner, [call("note_now", '{"text": "a"}'), "done"])
    assert completion.messages[1]["content"] == "a x"


async def test_names_say_run_entry_and_completion(pipe, socket, place):
    async with leased(pipe, socket) as (host, owner), episode_sandboxes_of(host, owner) as sandboxes:
        sandbox = await sandboxes.open(SPEC, purpose="agent")
        (record,) = (await host.place.records()).values()
        (listed,) = await place.list(host.run_id)
    assert sandbox.name.startswith(f"penstock-{host.run_id[:8].lower()}-{owner.lease.id}-2-")
    assert (record.entry, record.index, record.owner) == (owner.lease.id, 2, "w")
    assert (listed.name, round(1000 * listed.begun)) == (sandbox.name, record.begun_ms)


@asynccontextmanager
async def episode_sandboxes_of(host, owner):
    with episode_sandboxes(host, owner, 2) as sandboxes:
        yield sandboxes


@pytest.mark.parametrize("tool", ["note", "careless"])
async def test_a_lost_sandbox_leaves_the_completion_invalid(tool, pipe, socket, place):
    """Also if the environment catches the failure: what follows would be measured on nothing."""

    async def script(turn, _text):
        for listed in await place.list():
            await place.remove(listed.name)
        return call(tool, '{"text": "a"}') if turn == 0 else "done"

    async with leased(pipe, socket) as (host, owner):
        (completion,) = await played(host, owner, script)
    assert completion.failure.reason is RolloutReason.SANDBOX
    assert "lost" in completion.failure.cause.exception
    assert completion.parts == []


async def test_a_sandbox_lost_before_the_reward_is_no_zero(pipe, socket, place):
    async def script(_turn, _text):
        for listed in await place.list():
            await place.remove(listed.name)
        return "done"

    async with leased(pipe, socket) as (host, owner):
        (completion,) = await played(host, owner, script)
    assert completion.failure.reason is RolloutReason.SANDBOX
    assert completion.parts == []


async def test_what_the_policy_ends_it_reads(pipe, socket):
    async with leased(pipe, socket) as (host, owner):
        (completion,) = await played(host, owner, [call("end") + call("note", '{"text": "a"}'), "done"])
    assert "SandboxEndedError" in completion.messages[2]["content"]
    assert completion.failure is None
    assert isinstance(completion.parts[0].reward, Unmeasured)


@pytest.mark.parametrize("fault", ["refuse_create", "full"])
async def test_a_sandbox_that_cannot_start_gives_the_group_back(fault, pipe, socket, place):
    await place.ask(do="faults", faults={fault: 1.0})
    async with leased(pipe, socket) as (host, owner):
        with pytest.raises(SandboxFailure, match=fault.removeprefix("refuse_")):
            await played(host, owner, ["never sampled"], size=1 if fault == "full" else 4)
    counts, records = await read_sandbox_counts(pipe.connection), await host.place.records()
    assert counts.begun == counts.stopped + len(records) > 0
    assert len(records) == (counts.begun if fault == "refuse_create" else 0)  # what may come late is the reaper's
    assert all(record.is_due for record in records.values())


async def test_a_place_that_is_down_is_waited_for(pipe, tmp_path):
    with serve_place(tmp_path) as socket:
        async with leased(pipe, socket) as (host, owner):
            socket.unlink()
            with pytest.raises(SandboxFailure) as caught:
                await played(host, owner, ["never sampled"])
    assert caught.value.kind in {FailureKind.CREATE, FailureKind.UNREACHABLE}


async def test_no_more_start_at_once_than_the_settings_allow(pipe, socket, place):
    await place.ask(do="faults", faults={"create_s": 0.05})
    running, most = 0, 0
    async with leased(pipe, socket, starts_at_once=2) as (host, owner):
        create = host.provider.create

        async def watched(*args):
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await create(*args)
            finally:
                running -= 1

        host.provider.create = watched
        await played(host, owner, [call("note", '{"text": "a"}'), "done"], size=8)
        assert host.starts.borrowed_tokens == 0
    assert most == 2


async def test_waiting_for_a_turn_is_not_the_environments_time(pipe, socket, place):
    await place.ask(do="faults", faults={"create_s": 0.6})
    async with leased(pipe, socket, starts_at_once=1) as (host, owner):
        host.provider.options = type(host.provider.options)(address=str(socket), create_timeout_s=1, call_timeout_s=1)
        completions = await played(host, owner, [call("note", '{"text": "a"}'), "done"], size=6)
    assert [c.failure for c in completions] == [None] * 6


async def test_a_cancelled_episode_leaves_nothing(pipe, socket, place):
    await place.ask(do="faults", faults={"create_s": 0.3})
    async with leased(pipe, socket) as (host, owner):
        with anyio.move_on_after(0.1):
            await played(host, owner, ["done"], size=6)
    # What was being created may come late, so its record is the reaper's.
    records = await host.place.records()
    assert all(record.is_due for record in records.values())
    await anyio.sleep(0.4)
    assert {listed.name for listed in await place.list()} <= set(records)


async def test_a_refused_removal_is_left_to_the_reaper(pipe, socket, place):
    await place.ask(do="faults", faults={"refuse_removal": 1.0})
    async with leased(pipe, socket) as (host, owner):
        await played(host, owner, [call("note", '{"text": "a"}'), "done"])
    (record,) = (await host.place.records()).values()
    assert record.is_due
    assert len(await place.list()) == 1


async def test_more_than_the_settings_allow_is_refused_by_name(pipe, socket, place):
    async with leased(pipe, socket, max_memory_mb=32) as (host, owner):
        with pytest.raises(SandboxFailure, match=r"memory_mb = 64; sandboxes\.max_memory_mb allows 32"):
            await played(host, owner, ["never sampled"])
    assert (await place.ask(do="counts"))["created"] == 0


async def test_a_lost_lease_opens_nothing(pipe, socket, place):
    async with leased(pipe, socket) as (host, owner), episode_sandboxes_of(host, owner) as sandboxes:
        await owner.stage.release(owner.lease, "none", "")
        with pytest.raises(SandboxFailure, match="lost"):
            await sandboxes.open(SPEC, purpose="agent")
    assert (await place.ask(do="counts"))["created"] == 0


async def test_a_verifiers_sandbox_that_is_lost_does_not_end_the_episode(pipe, socket, place):
    async def script(turn, _text):
        for listed in await place.list():
            await place.remove(listed.name)
        return call("careless", '{"text": "a"}') if turn == 0 else "done"

    async with leased(pipe, socket) as (host, owner):
        (completion,) = await played(host, owner, script, purpose="verifier")
    assert completion.messages[1]["content"] == "never mind"


async def test_a_successor_goes_on_with_a_sandbox(pipe, socket, place):
    async with leased(pipe, socket) as (host, owner), episode_sandboxes_of(host, owner) as first:
        sandbox = await first.open(SPEC, purpose="agent")
        await sandbox.write({"a": b"x"})
        await owner.stage.release(owner.lease, "none", "")
        successor = pipe.stage("prompts", "v")
        (lease,) = (await successor.claim(1)).leases
        ((name, record),) = (await host.place.records()).items()
        with episode_sandboxes(host, SandboxOwner(successor, lease), 2) as second:
            adopted = await second.adopt(name, record)
            assert (await adopted.read("a", 10), adopted.spec) == (b"x", SPEC)
            with pytest.raises(SandboxFailure, match="fenced"):
                await sandbox.write({"b": b"x"})
            assert first.failure.kind is FailureKind.FENCED


async def test_without_a_run_sandboxes_are_removed_and_nothing_is_noted(socket, place):
    async with SandboxHost.open(settings_of(socket)) as host:
        (completion,) = await played(host, None, [call("note", '{"text": "a"}'), "done"])
    assert completion.failure is None
    assert await place.ask(do="counts") == {"created": 1, "removed": 1, "most": 1}


def test_a_provider_is_a_class_of_providers():
    with pytest.raises(Exception, match="is no class of providers"):
        load_provider(SandboxSettings(provider="tests.cases.sandbox_place:Place"))


def run_of(socket, **rollout):
    table = {
        "model": {"path": "m"},
        "sandboxes": {"provider": PROVIDER, "address": str(socket), "create_timeout_s": 5.0, "call_timeout_s": 2.0},
        "environments": {"box": f"{__name__}:Boxed"},
        "rollout": {"group_size": 1, **rollout},
    }
    return msgspec.convert(table, Settings)


async def test_check_tries_an_environment_in_a_sandbox_and_removes_it(socket, place):
    checker = Checker(run_of(socket, group_size=2), is_alone=True)
    prompt = Prompt(id="check:0:0", messages=[], environment="box")
    await EnvironmentCheck(checker, "box", prompt, turns=[ToolCall("note", {"text": "a"}, raw="")]).run()
    assert [f for f in checker.findings if f.level == "error"] == []
    counts = await place.ask(do="counts")
    assert counts["created"] == counts["removed"] > 1


async def test_check_says_that_the_place_of_the_sandboxes_does_not_answer(tmp_path):
    checker = Checker(run_of(tmp_path / "none.sock"), is_alone=True)
    prompt = Prompt(id="check:0:0", messages=[], environment="box")
    await EnvironmentCheck(checker, "box", prompt, turns=[]).run()
    assert any("gave no answer" in finding.message for finding in checker.findings if finding.level == "error")
