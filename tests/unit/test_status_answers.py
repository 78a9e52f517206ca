"""A status that cannot be read, as of a run of another version, is an error that says so."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from stream.errors import PenstockError
from stream.operator.status import read_status

STAGE = {"depth": 0, "claimed": 0, "delayed": 0, "marked": 0, "lag": 0, "oldest_age_ms": 0, "rate": 0, "consumers": {}}
STATUS = {
    "now_ms": 1e12,
    "stages": dict.fromkeys(("scored", "groups", "prompts"), STAGE),
    "unfinished": 0,
    "outstanding": 0,
    "dead": 0,
    "counts": {"fed": "3"},
}


def connection_that_answers(*parts: bytes) -> Any:
    async def run_script(*_: str) -> list[bytes]:
        return list(parts)

    return SimpleNamespace(run="my-run", run_script=run_script)


async def test_the_stages_are_in_the_order_of_the_flow():
    status = await read_status(connection_that_answers(msgspec.json.encode(STATUS)))
    assert list(status.stages) == ["prompts", "groups", "scored"]


@pytest.mark.parametrize(
    "change",
    [
        {"stages": {}},
        {"stages": {"prompts": STAGE}},
        {"counts": {"fed": "many"}},
        {"latest": "[1]"},
        {"latest": "{"},
        {"policy": {"version": "new"}},
        {"policy": {"step": "new"}},
        {"meta": {"capacity": "inf"}},
        {"meta": {"paused": "me"}},
        {"meta": {"paused": "me", "paused_ms": "9" * 17}},
        {"evaluation": {"stages": {}}},
        {"evaluation": {"stages": dict.fromkeys(("eval:prompts", "eval:groups"), STAGE), "latest": "x"}},
    ],
)
async def test_a_status_of_another_form_is_an_error_that_names_the_run(change):
    with pytest.raises(PenstockError, match=r"status of run 'my-run' cannot be read.*another version"):
        await read_status(connection_that_answers(msgspec.json.encode(STATUS | change)))


@pytest.mark.parametrize("parts", [[], [b"?"], [msgspec.json.encode(STATUS), b"prompts"]])
async def test_an_answer_of_another_form_is_an_error_that_names_the_run(parts):
    with pytest.raises(PenstockError, match="status of run 'my-run' cannot be read"):
        await read_status(connection_that_answers(*parts))
