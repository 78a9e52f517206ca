"""How many examples each property is shown.

In CI few, so that all of them together take about a minute. By hand, with HYPOTHESIS_PROFILE=thorough, 5,000 for what most
runs rest on and 200 for the rest, without a time limit.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from workers.train.algorithms.importance import IMPORTANCE
from workers.train.algorithms.rejection import REJECTIONS

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
QUICK = {"test_properties_of_the_path": 5, "test_properties_of_": 20, "test_twins_of_": 25}
"""At most so many examples to a test of the modules whose names begin so, but by hand."""
MOST = 5000
RESTED_ON = {
    *("grpo", "rloo", "opo", "passk", "grpo_passk", "reinforce_plus_plus_baseline", "gpg", "gdpo", "whiten", "clipped"),
    *IMPORTANCE,
    *REJECTIONS,
}
"""Registered names that get `MOST` by hand, and so does every test of whitening and of the correction."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PROFILE == "thorough":
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(autouse=True)
def number_of_examples(request: pytest.FixtureRequest) -> Iterator[None]:
    number = _examples(request.node)
    settings.register_profile("this test", settings.get_profile(PROFILE), max_examples=number)
    settings.load_profile("this test")
    yield
    settings.load_profile(PROFILE)


def _examples(item: pytest.Item) -> int:
    usual = settings.get_profile(PROFILE).max_examples
    module = item.path.stem
    if PROFILE == "thorough":
        subjects = " ".join(str(value) for value in item.callspec.params.values()) if hasattr(item, "callspec") else ""
        rested_on = RESTED_ON & set(subjects.split()) or "whitening" in item.name or "correction" in module
        return MOST if rested_on else usual
    return next((min(usual, number) for start, number in QUICK.items() if module.startswith(start)), usual)
