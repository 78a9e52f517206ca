"""A slice of `tests/soak/escapes.py`: answers that were written to escape or to break do neither."""

import pytest

from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)
from tests.soak.escapes import attack

pytest.importorskip("reasoning_gym", reason='needs pip install "penstock[reasoning-gym]"')


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.timeout(240)
def test_answers_that_were_written_to_escape_or_to_break_do_neither():
    report = attack(6, seed=3)
    assert not report["changed_files"]
    assert not report["findings"]
    assert {sum(counts.values()) for counts in report["outcomes"].values()} == {6}


@pytest.mark.full
@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.timeout(1200)
def test_a_hundred_answers_that_were_written_to_escape_or_to_break_do_neither(request):
    seed = request.config.getoption("--hypothesis-seed") or "1"
    report = attack(100, seed=int(seed) if seed.isdigit() else 1)
    assert not report["changed_files"]
    assert not report["findings"]
