"""A status that cannot be read, as of a run of another version, is an error that says so."""

import msgspec
import pytest

from stream.errors import PenstockError
from stream.operator import run_status
from stream.operator.run_status import read_status_once

STAGE = {"depth": 0, "claimed": 0, "delayed": 0, "marked": 0, "lag": 0, "oldest_age_ms": 0, "rate": 0, "consumers": {}}
STATUS = {
    "now_ms": 1e12,
    "stages": dict.fromkeys(("scored", "groups", "prompts"), STAGE),
    "unfinished": 0,
    "outstanding": 0,
    "dead": 0,
    "counts": {"fed": "3"},
}


@pytest.fixture
def answer(monkeypatch):
    def set_answer(*parts: bytes) -> None:
        monkeypatch.setattr(run_status, "call_script_once", lambda *_: list(parts))

    return set_answer


def test_the_stages_are_in_the_order_of_the_flow(answer):
    answer(msgspec.json.encode(STATUS))
    assert list(read_status_once("redis://host", "run").stages) == ["prompts", "groups", "scored"]


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
def test_a_status_of_another_form_is_an_error_that_names_the_run(answer, change):
    answer(msgspec.json.encode(STATUS | change))
    with pytest.raises(PenstockError, match=r"status of run 'my-run' cannot be read.*another version"):
        read_status_once("redis://host", "my-run")


@pytest.mark.parametrize("parts", [[], [b"?"], [msgspec.json.encode(STATUS), b"prompts"]])
def test_an_answer_of_another_form_is_an_error_that_names_the_run(answer, parts):
    answer(*parts)
    with pytest.raises(PenstockError, match="status of run 'my-run' cannot be read"):
        read_status_once("redis://host", "my-run")
