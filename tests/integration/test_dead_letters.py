"""Dead letters are listed, retried, dropped, and counted."""

import anyio
import pytest

from stream.errors import PenstockError
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.operator.status import read_status


async def bury(pipe, stage="prompts", reason="data") -> None:
    worker = pipe.stage(stage, f"undertaker-{stage}", data_attempts=1)
    (lease,) = (await worker.claim(1)).leases
    if reason == "data":
        assert await worker.release(lease, "data", "does not render")
    else:
        await worker.dead_letter(lease, reason, "altered")


async def test_letters_are_listed_oldest_first(pipe):
    await pipe.feed("a", "b")
    await bury(pipe)
    await bury(pipe, reason="unreadable")
    first, second = await list_dead_letters(pipe.connection)
    assert (first.prompt_id, first.reason, first.data_failures) == ("a", "data", 1)
    assert (second.prompt_id, second.reason, second.error) == ("b", "unreadable", "altered")
    assert await list_dead_letters(pipe.connection, letter_id=second.id) == [second]
    assert await list_dead_letters(pipe.connection, count=1) == [first]
    assert await pipe.prompt_counts() == {"fed": 2, "trained": 0, "dropped": 0, "dead": 2, "outstanding": 0}


@pytest.mark.parametrize("stage", ["prompts", "groups", "scored"])
async def test_a_retried_letter_returns_to_its_stage_without_failures(pipe, stage):
    await {"prompts": pipe.feed, "groups": pipe.rolled_out, "scored": pipe.scored}[stage]("a")
    await bury(pipe, stage)
    (letter,) = await list_dead_letters(pipe.connection)
    await retry_dead_letters(pipe.connection, [letter.id])
    assert await list_dead_letters(pipe.connection) == []
    (lease,) = (await pipe.stage(stage).claim(10)).leases
    assert (lease.prompt_id, lease.payload) == ("a", letter.payload)
    assert (lease.infra_failures, lease.data_failures) == (0, 0)
    assert await pipe.prompt_counts() == {"fed": 1, "trained": 0, "dropped": 0, "dead": 0, "outstanding": 1}


async def test_letters_are_counted_by_reason_whatever_the_operator_does_with_them(pipe):
    await pipe.feed("a", "b", "c")
    await bury(pipe)
    await bury(pipe, reason="unreadable")
    first, second = await list_dead_letters(pipe.connection)
    await retry_dead_letters(pipe.connection, [first.id])
    await drop_dead_letters(pipe.connection, [second.id])
    await bury(pipe)
    assert (await read_status(pipe.connection)).dead_reasons == {"data": 2, "unreadable": 1}


async def test_a_dropped_letter_ends_its_prompt(pipe):
    await pipe.feed("a", "b")
    await bury(pipe)
    await drop_dead_letters(pipe.connection, [letter.id for letter in await list_dead_letters(pipe.connection)])
    assert await list_dead_letters(pipe.connection) == []
    assert (await read_status(pipe.connection)).dropped == {"operator": 1}
    assert await pipe.prompt_counts() == {"fed": 2, "trained": 0, "dropped": 1, "dead": 0, "outstanding": 1}


@pytest.mark.parametrize("verb", [retry_dead_letters, drop_dead_letters])
async def test_a_foreign_entry_does_not_count_among_the_prompts(pipe, verb):
    await pipe.connection.redis.xadd(pipe.connection.key("prompts"), {"prompt": "foreign", "payload": "junk"})
    await bury(pipe, reason="unreadable")
    assert (await read_status(pipe.connection)).counts == {"extra_dead_letters": 1}
    (letter,) = await list_dead_letters(pipe.connection)
    await verb(pipe.connection, [letter.id])
    assert await pipe.prompt_counts() == {"fed": 0, "trained": 0, "dropped": 0, "dead": 0, "outstanding": 0}


@pytest.mark.parametrize("stage", ["prompts", "groups", "scored"])
@pytest.mark.parametrize("foreign_in", ["prompts", "groups", "scored"])
async def test_a_foreign_entry_with_the_id_of_an_unfinished_prompt_does_not_end_it(pipe, stage, foreign_in):
    """The prompt's real entry continues in any stage, and may itself become a dead letter."""
    await {"prompts": pipe.feed, "groups": pipe.rolled_out, "scored": pipe.scored}[stage]("a")
    own = pipe.stage(stage, "own")
    (lease,) = (await own.claim(1)).leases
    await pipe.connection.redis.xadd(pipe.connection.key(foreign_in), {"prompt": "a", "payload": "junk"})
    await bury(pipe, foreign_in, reason="unreadable")
    assert await pipe.prompt_counts() == {"fed": 1, "trained": 0, "dropped": 0, "dead": 0, "outstanding": 1}
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "extra_dead_letters": 1}
    await own.dead_letter(lease, "unreadable", "altered")
    assert await pipe.prompt_counts() == {"fed": 1, "trained": 0, "dropped": 0, "dead": 1, "outstanding": 0}
    assert [letter.ends_prompt for letter in await list_dead_letters(pipe.connection)] == [False, True]


@pytest.mark.parametrize("letter_id", ["1-1", "nonsense", "", "1", "-", "+"])
async def test_an_unknown_letter_is_an_error(pipe, letter_id):
    for verb in (retry_dead_letters, drop_dead_letters):
        with pytest.raises(PenstockError, match="has no dead letter"):
            await verb(pipe.connection, [letter_id])


async def test_a_letter_without_an_entry_can_only_be_dropped(pipe):
    letter_id = (await pipe.connection.redis.xadd(pipe.connection.key("dead"), {"stage": "prompts"})).decode()
    with pytest.raises(PenstockError, match="drop it"):
        await retry_dead_letters(pipe.connection, [letter_id])
    await drop_dead_letters(pipe.connection, [letter_id])
    assert await list_dead_letters(pipe.connection) == []


@pytest.mark.parametrize("verb", [retry_dead_letters, drop_dead_letters])
async def test_operators_who_resolve_the_same_letters_at_once_resolve_each_once(pipe, verb):
    prompts = [f"p{i}" for i in range(20)]
    await pipe.feed(*prompts)
    worker = pipe.stage("prompts")
    for lease in (await worker.claim(20)).leases:
        await worker.dead_letter(lease, "unreadable", "altered")
    letters = [letter.id for letter in await list_dead_letters(pipe.connection)]
    absent: list[str] = []

    async def operate() -> None:
        absent.extend(await verb(pipe.connection, letters))

    async with anyio.create_task_group() as operators:
        for _ in range(3):
            operators.start_soon(operate)
    assert len(absent) == 2 * len(letters), "each letter was there for one of the three"
    counts = await pipe.prompt_counts()
    if verb is retry_dead_letters:
        assert sorted(lease.prompt_id for lease in (await worker.claim(100)).leases) == sorted(prompts)
        assert (counts["outstanding"], counts["dead"]) == (20, 0)
    else:
        assert (counts["dropped"], counts["dead"]) == (20, 0)
