"""`penstock run` with a trainer of two ranks: to its end, and with a rank killed on the way."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.harness import balanced, children, finish, stop, summary_of, wait_for_trained

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
