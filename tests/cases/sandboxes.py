"""Tests that need sandboxes are skipped where this machine makes none, and fail in CI."""

import os

import pytest

from envs.sandboxes.bubblewrap import sandbox_problem


@pytest.fixture
def needs_sandbox() -> None:
    """Skip the test on a machine without sandboxes; fail in CI, which has to have them."""
    if problem := sandbox_problem():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no sandboxes: {problem}")
