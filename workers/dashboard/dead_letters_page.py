"""The page *Dead letters*: what no worker could complete, and why; retry and drop where that is allowed."""

import re
import time
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

import anyio
import anyio.to_thread
from aiohttp import web
from yarl import URL

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.queue.entry_scan import DeadEntry, scan_dead_page
from stream.wording import quantity
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.templating import with_query
from workers.runs.dead_letters import Change, read_payload, record_ends
from workers.runs.find import refuse_other_run

_COUNT_S: Final = 0.4
"""Time to count letters by reason; the page then says how many were counted."""
_CHANGE_S: Final = 15.0
"""Time for one retry or drop of many letters; the page then says how many are left."""
_ACTIONS: Final = {"retry": retry_dead_letters, "drop": drop_dead_letters}
_DONE: Final = {"retry": "retried", "drop": "dropped"}


async def dead_letters_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Dead letters*."""
    run = await dashboard.run(request)
    query = {name: request.query.get(name, "") for name in ("reason", "stage", "after")}
    query["done"] = dashboard.take_note(request.query.get("done", ""))
    values: dict[str, Any] = {"query": query, "letters": [], "counts": {}, "counted": 0, "total": 0, "problem": ""}
    values |= {"next": "", "died_at": _died_at}
    try:
        async with run.connect(start_server=False) as connection:
            values["letters"], values["next"] = await _read_page(connection, query)
            values["counts"], values["counted"] = await _count_reasons(connection)
            values["total"] = await connection.with_retry(lambda: connection.redis.xlen(connection.key("dead")))
    except PenstockError as error:
        values["problem"] = str(error)
    return dashboard.page("dead_letters.html", run, values)


async def dead_letter_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The content of one dead letter, as JSON for people."""
    run = await dashboard.run(request)
    async with run.connect(start_server=False) as connection:
        letters = await list_dead_letters(connection, letter_id=request.query.get("id", "-"))
    if not letters:
        raise web.HTTPNotFound(text="That dead letter was retried or dropped meanwhile.")
    content = await anyio.to_thread.run_sync(read_payload, letters[0])
    return dashboard.page("dead_letter.html", run, {"letter": letters[0], "content": content, "died_at": _died_at})


async def change_dead_letters(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """Retry or drop one letter, or all with a reason. The middleware has checked that this is allowed."""
    run = await dashboard.run(request)
    form = await request.post()
    action, letter, reason, stage = (str(form.get(name, "")) for name in ("action", "id", "reason", "stage"))
    if action not in _ACTIONS:
        raise web.HTTPBadRequest(text="The action is retry or drop.")
    async with run.connect(start_server=False) as connection:
        await refuse_other_run(run, connection)
        if letter:
            count, is_done = await _change(connection, _ACTIONS[action], [letter]), True
        else:
            count, is_done = await _change_all(connection, _ACTIONS[action], reason, stage)
        await record_ends(run, connection)
    text = f"{_DONE[action]} {quantity(count, 'dead letter')}"
    text += "" if is_done else "; the time was up before all were done, repeat it for the rest"
    raise web.HTTPSeeOther(
        URL(with_query(f"/runs/{quote(run.key, safe='')}/dead", {"done": dashboard.keep_note(text)}), encoded=True)
    )


async def _read_page(connection: RunConnection, query: dict[str, str]) -> tuple[list[DeadEntry], str]:
    """Return the letters of one page, and the id after which the next page begins; empty: there is none."""
    found: list[DeadEntry] = []
    after, deadline = query["after"] or "-", time.monotonic() + _COUNT_S
    if after != "-" and not re.fullmatch(r"[0-9]{1,19}-[0-9]{1,19}", after):
        raise web.HTTPBadRequest(text="The address has no id of a dead letter.")
    while not found or time.monotonic() < deadline:
        page = await scan_dead_page(connection, after)
        if not page:
            return found, ""
        after = page[-1].id
        found += [letter for letter in page if _matches(letter, query["reason"], query["stage"])]
        if len(found) >= 50:
            break
    return found, after


async def _count_reasons(connection: RunConnection) -> tuple[dict[tuple[str, str], int], int]:
    """Return the number of letters by stage and reason, the oldest letters first, and how many were counted."""
    counts: dict[tuple[str, str], int] = {}
    after, counted, deadline = "-", 0, time.monotonic() + _COUNT_S
    while time.monotonic() < deadline and (page := await scan_dead_page(connection, after)):
        after = page[-1].id
        counted += len(page)
        for letter in page:
            counts[letter.stage, letter.reason] = counts.get((letter.stage, letter.reason), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])), counted


async def _change_all(connection: RunConnection, change: Change, reason: str, stage: str) -> tuple[int, bool]:
    """Retry or drop all letters with a reason that are there now. Returns their number, and whether all were done."""
    count, after, deadline = 0, "-", time.monotonic() + _CHANGE_S
    newest: Any = await connection.with_retry(
        lambda: connection.redis.xrevrange(connection.key("dead"), "+", "-", count=1)
    )
    last = _order(newest[0][0].decode()) if newest else (0, 0)
    while page := await scan_dead_page(connection, after):
        after = page[-1].id
        for letter in page:
            if _order(letter.id) > last:  # it died again, or after the button was pressed
                return count, True
            if _matches(letter, reason, stage):
                count += await _change(connection, change, [letter.id], must_exist=False)
        if time.monotonic() > deadline:
            return count, False
    return count, True


async def _change(connection: RunConnection, change: Change, ids: list[str], *, must_exist: bool = True) -> int:
    try:
        return len(ids) - len(await change(connection, ids))
    except PenstockError:
        if must_exist:
            raise
        return 0


def _matches(letter: DeadEntry, reason: str, stage: str) -> bool:
    return (not reason or letter.reason == reason) and (not stage or letter.stage == stage)


def _order(entry_id: str) -> tuple[int, int]:
    time_ms, _, number = entry_id.partition("-")
    return int(time_ms), int(number)


def _died_at(entry_id: str) -> str:
    return f"{datetime.fromtimestamp(_order(entry_id)[0] / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
