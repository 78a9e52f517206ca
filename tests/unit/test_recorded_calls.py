"""What an episode asks of its sandboxes has ids that are the same if another worker runs it again."""

from types import SimpleNamespace

import anyio
import pytest

from envs.sandboxes.contract import ExecResult
from tests.cases.progress import SavedGroup
from tests.unit.test_episode import Box, call, factory_of, group_of
from workers.rollout.recorded_calls import CallScope, RecordedCalls, call_scope
from workers.rollout.resume import EpisodeJournal, RestoreMethod
from workers.rollout.sandboxes import _WatchedSandbox


class Noting:
    """A sandbox that notes what it is asked."""

    name, spec = "one", None

    def __init__(self):
        self.asked = []

    async def exec(self, command, *, id, **_):  # noqa: A002
        self.asked.append((*command, id))
        return ExecResult(code=0)

    async def write(self, files, *, user=""):
        self.asked.append(tuple(files))

    async def read(self, path, max_bytes):
        return b""

    async def changed_files(self):
        return []

    async def snapshot(self):
        return "image"


@pytest.fixture
def scope():
    token = call_scope.set(CallScope("turn0"))
    yield
    call_scope.reset(token)


def watched():
    inner, calls = Noting(), RecordedCalls()
    return inner, calls, _WatchedSandbox(inner, None, lambda _: None, calls)


async def commands(sandbox):
    for command in (["ls"], ["ls"], ["make", "all"]):
        await sandbox.exec(command, timeout_s=1)
    await sandbox.exec(["ls"], timeout_s=1, cwd="/tmp")
    await sandbox.exec(["ls"], timeout_s=1, id="own")


async def test_the_same_commands_have_the_same_ids_and_others_have_others(scope):
    (first, _, one), (second, _, other) = watched(), watched()
    await commands(one)
    await commands(other)
    assert first.asked == second.asked
    names = [asked[-1] for asked in first.asked]
    assert len(set(names)) == len(names) == 5
    assert names[-1] == "own"
    assert all(name.startswith("turn0-") for name in names[:-1])


async def test_commands_outside_of_an_episode_have_no_ids():
    inner, _, sandbox = watched()
    await sandbox.exec(["ls"], timeout_s=1)
    assert inner.asked == [("ls", "")]


async def test_a_synchronous_tool_gives_its_commands_ids_too(scope):
    inner, calls = Noting(), RecordedCalls()
    async with anyio.from_thread.BlockingPortal() as portal:
        sandbox = _WatchedSandbox(inner, portal, lambda _: None, calls)
        await anyio.to_thread.run_sync(lambda: sandbox.run(["ls"], timeout_s=1))
        await sandbox.exec(["ls"], timeout_s=1)
    assert [name.rpartition("-")[2] for _, name in inner.asked] == ["0", "1"]


async def test_a_past_call_writes_nothing_again_and_what_it_cannot_know_is_a_difference(scope):
    inner, calls, sandbox = watched()
    call_scope.set(CallScope("turn0", is_past=True))
    await sandbox.write({"/a": b"x"})
    await sandbox.exec(["ls"], timeout_s=1)
    assert [asked[0] for asked in inner.asked] == ["ls"]
    assert not calls.difference
    for ask in (sandbox.snapshot, sandbox.changed_files, lambda: sandbox.read("/a", 1)):
        calls.difference = ""
        await ask()
        assert calls.difference.startswith("turn0 ")


def journal_of(saved, *, replayable, survives=True):
    factory = factory_of(type("Boxed", (Box,), {"replayable": replayable}))
    slot = SimpleNamespace(name="box", factory=factory, runs_own_loop=False, uses_sandboxes=True)
    return EpisodeJournal(saved, 0, slot, survives=survives)


@pytest.mark.parametrize(
    ("replayable", "survives", "sandboxes", "method"),
    [
        (False, True, ["a", "b"], RestoreMethod.ADOPT),
        (True, True, ["a", "b"], RestoreMethod.ADOPT),
        (True, True, [], RestoreMethod.REPLAY),
        (False, True, [], RestoreMethod.ANEW),
        (True, False, ["a"], RestoreMethod.REPLAY),
        (False, False, ["a"], RestoreMethod.ANEW),
    ],
)
async def test_sandboxes_that_survive_are_adopted(replayable, survives, sandboxes, method):
    saved = SavedGroup()
    group = await group_of([call("put"), "Done."])
    first = journal_of(await saved.journal(), replayable=replayable, survives=survives)
    row = group.completions[0].rows[0]
    turn = SimpleNamespace(
        token_ids=row.tokens.tolist()[:3],
        logprobs=[-0.5] * 3,
        is_truncated=False,
        spans=[row.spans[0].__class__(7, 0, 3)],
    )
    first.save_turn(turn, 1, sandboxes)
    heir = journal_of(await saved.journal(), replayable=replayable, survives=survives)
    assert heir.method is method
    if method is not RestoreMethod.ADOPT:
        return
    assert heir.sandboxes == tuple(sandboxes)
    assert heir.is_past()
    heir.give_up_sandboxes()
    assert heir.method is (RestoreMethod.REPLAY if replayable else RestoreMethod.ANEW)
    assert not heir.is_past()
