"""`penstock run` with a trainer of two ranks: to its end, and with a rank killed on the way."""

import pytest

from tests.e2e.harness import balanced, summary_of

pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def shared(project):
    project.table["train"]["ranks"] = 2
    project.table["filter"] = {"zero_variance": False}
    return project


def test_a_run_of_two_ranks_ends(shared):
    summary = summary_of(shared.run("run", str(shared.write()), "--json"), shared)
    assert balanced(summary)
    assert summary["groups_trained"] == summary["fed"] == 10
