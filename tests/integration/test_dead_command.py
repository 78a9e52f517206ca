"""`penstock dead`: list, show, retry and drop entries that no worker could finish."""

import json

import anyio
import pytest

from stream.errors import PenstockError
from stream.operator.dead_letters import list_dead_letters
from stream.operator.status import read_status
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Completion, Group, Prompt
from stream.validity import Measured
from tests.cases.rows import sampled_row
from workers.runs.dead_letters import LetterChoice, hex_dump
from workers.runs.find import open_run
from workers.terminal import dead_letters
from workers.terminal.dead_letters import drop_dead, list_dead, retry_dead, show_dead

pytestmark = pytest.mark.usefixtures("silent_logs")

TERMS = RetryPolicy(data_attempts=1)


async def dead_letter_prompt(connection, name: str = "a", error: str = "its image does not decode") -> str:
    feed = Feed(connection, 10)
    cursor = await feed.cursor()
    await feed.put([Prompt(id=name, messages=[{"role": "user", "content": "?"}])], cursor, f"after {name}")
    stage = Stage(connection, "prompts", "rollout-1", TERMS)
    (lease,) = (await stage.claim(1)).leases
    assert await stage.release(lease, "data", error)
    return (await list_dead_letters(connection))[-1].id


async def dead_letter_junk(connection) -> str:
    await connection.redis.xadd(connection.key("groups"), {"payload": b"\x00junk\xff" * 3})
    stage = Stage(connection, "groups", "score-1", TERMS)
    (lease,) = (await stage.claim(1)).leases
    await stage.dead_letter(lease, "unreadable", "no record")
    return (await list_dead_letters(connection))[-1].id


@pytest.fixture
def run_command(redis_url, run_name, capsys):
    async def run(command, *arguments, **named) -> str:
        """Return the command's output. The command runs an event loop, so it runs in a thread."""
        await anyio.to_thread.run_sync(lambda: command(open_run(run_name, redis_url), *arguments, **named))
        return capsys.readouterr().out

    return run


async def test_the_list_has_stage_reason_and_error(connection, run_command):
    letter = await dead_letter_prompt(connection)
    junk = await dead_letter_junk(connection)
    output = await run_command(list_dead)
    first, why, second, _ = output.splitlines()
    assert first.startswith(letter)
    assert first.endswith("prompts  data  after 1 failure  a")
    assert why == "    its image does not decode"
    assert second.startswith(junk)
    first, second = json.loads(await run_command(list_dead, as_json=True))
    assert (first["id"], first["stage"], first["prompt_id"], first["reason"]) == (letter, "prompts", "a", "data")
    assert (first["data_failures"], first["ends_prompt"], first["error"]) == (1, True, "its image does not decode")
    assert (second["id"], second["ends_prompt"], second["reason"]) == (junk, False, "unreadable")
    assert "payload" not in first


async def test_a_run_without_dead_letters_says_so(connection, run_command):
    await Feed(connection, 10).put([Prompt(id="a", messages=[])], "", "1")
    for command in (list_dead, show_dead):
        assert await run_command(command) == "no dead letters\n"
        assert json.loads(await run_command(command, as_json=True)) == []


async def test_a_record_is_shown_as_plain_values(connection, run_command):
    await dead_letter_prompt(connection)
    (reported,) = json.loads(await run_command(show_dead, as_json=True))
    assert reported["record"]["messages"] == [{"role": "user", "content": "?"}]
    assert json.loads(await run_command(show_dead))["record"] == reported["record"]


async def test_token_buffers_are_shown_as_numbers(connection, run_command):
    await dead_letter_prompt(connection)
    row = sampled_row([7], [-0.5], version=3, prompt=[5, 6])
    completion = Completion(index=0, rows=[row], reward=Measured(value=1.0), snapshot=b"\x00\x01")
    prompts = Stage(connection, "prompts", "rollout-1", TERMS)
    await Feed(connection, 10).put([Prompt(id="b", messages=[])], "after a", "2")
    (lease,) = (await prompts.claim(1)).leases
    await prompts.complete(lease, "groups", Group(prompt=Prompt(id="b", messages=[]), completions=[completion]))
    groups = Stage(connection, "groups", "score-1", TERMS)
    (lease,) = (await groups.claim(1)).leases
    await groups.dead_letter(lease, "data", "for the test")
    last = (await list_dead_letters(connection))[-1].id
    (reported,) = json.loads(await run_command(show_dead, LetterChoice((last,)), as_json=True))
    shown = reported["record"]["completions"][0]
    assert shown["rows"][0]["prompt_ids"] == [5, 6]
    assert shown["rows"][0]["logprobs"] == [-0.5]
    assert shown["rows"][0]["spans"] == [[3, 0, 1]]
    assert shown["reward"]["value"] == 1.0


async def test_an_unreadable_payload_is_shown_as_bytes_with_the_reason(connection, run_command):
    await dead_letter_junk(connection)
    (reported,) = json.loads(await run_command(show_dead, as_json=True))
    assert "record" not in reported
    assert reported["unreadable"].startswith("not a record")
    assert reported["bytes"] == 18
    assert "00 6a 75 6e 6b ff" in await run_command(show_dead)


async def test_a_retried_letter_is_back_in_its_stage(connection, run_command):
    letter = await dead_letter_prompt(connection)
    assert json.loads(await run_command(retry_dead, LetterChoice((letter,)), as_json=True)) == {"retried": [letter]}
    status = await read_status(connection)
    assert (
        status.dead,
        status.prompt_counts["dead"],
        status.prompt_counts["outstanding"],
        status.stages["prompts"].lag,
    ) == (
        0,
        0,
        1,
        1,
    )


async def test_a_letter_that_is_refused_does_not_hold_up_the_others(connection, run_command):
    await dead_letter_junk(connection)
    empty = await connection.redis.xadd(connection.key("dead"), {"stage": "groups", "reason": "unreadable"})
    await dead_letter_prompt(connection)
    refused = f"2 were retried.*dead letter {empty.decode()} has no entry to put back; drop it"
    with pytest.raises(PenstockError, match=refused):
        await run_command(retry_dead, LetterChoice())
    assert [letter.id for letter in await list_dead_letters(connection)] == [empty.decode()]


async def test_a_letter_counts_once_and_only_if_it_was_there(connection, run_command, monkeypatch):
    letter, other = await dead_letter_prompt(connection), await dead_letter_prompt(connection, "b")
    listed = json.loads(await run_command(list_dead, LetterChoice((letter, letter)), as_json=True))
    assert [each["id"] for each in listed] == [letter]

    async def another_operator_was_faster(connection, letter_ids) -> list[str]:
        assert letter_ids == [letter, other]
        return [other]

    monkeypatch.setattr(dead_letters, "drop_dead_letters", another_operator_was_faster)
    assert json.loads(await run_command(drop_dead, LetterChoice((letter, other)), as_json=True)) == {
        "dropped": [letter]
    }


async def test_the_prompt_of_an_evaluation_is_shown(connection, run_command):
    await dead_letter_prompt(connection)
    (letter,) = await list_dead_letters(connection)
    letter.stage = "eval:prompts"
    assert dead_letters.read_payload(letter)["record"]["id"] == "a"


async def test_a_dropped_letter_counts_as_dropped(connection, run_command):
    await dead_letter_prompt(connection)
    await dead_letter_junk(connection)
    assert await run_command(drop_dead, LetterChoice()) == "dropped 2 dead letters\n"
    status = await read_status(connection)
    assert (status.dead, status.dropped) == (0, {"operator": 1})


async def test_those_with_a_reason_are_retried_and_no_others(connection, run_command):
    ids = [await dead_letter_prompt(connection, *each) for each in (("a", "no image"), ("b", "a timeout"))]
    assert json.loads(await run_command(retry_dead, LetterChoice(reason="timeout"), as_json=True)) == {
        "retried": [ids[1]]
    }
    listed = json.loads(await run_command(list_dead, LetterChoice(reason="data"), as_json=True))
    assert [letter["id"] for letter in listed] == [ids[0]]
    with pytest.raises(PenstockError, match="has the reason 'disk'"):
        await run_command(drop_dead, LetterChoice(reason="disk"))


async def test_what_a_letter_says_is_shown_escaped(connection, run_command):
    await dead_letter_prompt(connection, "a\x1b[2J", "no\u202eimage")
    output = await run_command(list_dead)
    assert "a\\x1b[2J" in output
    assert "no\\u202eimage" in output


async def test_an_unknown_id_changes_nothing(connection, run_command):
    letter = await dead_letter_prompt(connection)
    with pytest.raises(PenstockError, match="has no dead letter 1-1"):
        await run_command(drop_dead, LetterChoice((letter, "1-1")))
    assert (await read_status(connection)).dead == 1


def test_a_hex_dump_has_offset_bytes_and_text():
    assert hex_dump(b"PS\x00") == f"{'000000  50 53 00':<55}  PS."
    assert hex_dump(bytes(17)).splitlines()[1].startswith("000010  00")
