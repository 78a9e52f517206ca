"""Set the number of examples per property.

In CI it is small, so that all properties together take about a minute. By hand, `HYPOTHESIS_PROFILE=thorough` runs
5,000 examples for the code that most runs use and 200 for the rest, including the whole path, without a time limit.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
QUICK = {"test_properties_of_the_path": 3, "test_properties_of_": 8, "test_twins_of_": 15, "test_": 25}
"""Maximum number of examples per test, by the prefix of the module's name."""
MOST = 5000
RESTED_ON = {
    *("grpo", "rloo", "opo", "passk", "grpo_passk", "reinforce_plus_plus_baseline", "gpg", "gdpo"),
    *("whiten", "loss:clipped", "clipped"),
}
"""Registered names that get `MOST` under the `thorough` profile, as do all tests of whitening and of the correction."""
LIMITS_S = {"nightly": 900, "thorough": 0}
"""Time limit of one test under these profiles, in seconds; 0: none."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if PROFILE in LIMITS_S and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(LIMITS_S[PROFILE]))


@pytest.fixture(autouse=True)
def number_of_examples(request: pytest.FixtureRequest) -> Iterator[None]:
    attribute = "_hypothesis_internal_use_settings"
    usual = getattr(request.function, attribute, None)
    settings.register_profile("this test", settings.get_profile(PROFILE), max_examples=_examples(request.node))
    settings.load_profile("this test")
    if usual is not None:
        # Hypothesis stores the settings per parameter when it decorates a test; there is no public way to change them.
        setattr(request.function, attribute, settings.default)
    yield
    settings.load_profile(PROFILE)
    if usual is not None:
        setattr(request.function, attribute, usual)


def _examples(item: pytest.Item) -> int:
    usual = settings.get_profile(PROFILE).max_examples
    module = item.path.stem
    if PROFILE == "thorough":
        subjects = " ".join(str(value) for value in item.callspec.params.values()) if hasattr(item, "callspec") else ""
        rested_on = RESTED_ON & set(subjects.split()) or "whitening" in item.name or "correction" in module
        return MOST if rested_on and not module.endswith("_the_path") else usual
    if PROFILE == "nightly":
        return usual
    return next((min(usual, number) for start, number in QUICK.items() if module.startswith(start)), usual)
