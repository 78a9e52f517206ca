"""Fixtures for whole runs."""

from collections.abc import Iterator

import pytest

from tests.base_models.demo_model import make_model
from tests.e2e.browser import Browser, open_browser
from tests.e2e.harness import Project


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """A model with random weights."""
    folder = tmp_path_factory.mktemp("model") / "policy"
    make_model(folder, seed=0)
    return folder


@pytest.fixture
def project(tmp_path, random_model):
    """A user's folder with ten prompts and a random reward."""
    return Project(tmp_path, random_model)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser
