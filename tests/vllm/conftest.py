"""Shared fixtures of the tests on real vLLM: the servers, and the order of the tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.served import Served
from tests.vllm.shared import SharedServers, Started, last_needed

FIGURES = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by the servers they need, so that later servers start while earlier ones are tested."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.parent == here]
    items[:] = [item for item in items if item.path.parent != here] + sorted(ours, key=last_needed)


@pytest.fixture
def measured(request) -> Callable[[str], None]:
    """Record a figure that is printed at the end, after success as well."""
    result = request.config.stash.setdefault(FIGURES, [])
    return lambda figure: result.append(f"{request.node.name}: {figure}")


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Print the recorded figures."""
    if figures := config.stash.get(FIGURES, []):
        terminalreporter.section("measured on vLLM")
        for figure in figures:
            terminalreporter.line(figure)


@pytest.fixture(scope="session")
def servers(request, tmp_path_factory) -> Iterator[SharedServers]:
    result = SharedServers(tmp_path_factory.mktemp("servers"), request.session.items)
    yield result
    result.close()


@pytest.fixture
def pooling(servers, request) -> Iterator[Started]:
    """A server that scores."""
    yield from servers.lend("pooling", request.node.nodeid)


@pytest.fixture
def lora(servers, request) -> Iterator[Started]:
    """A server that accepts adapters."""
    yield from servers.lend("lora", request.node.nodeid)


@pytest.fixture
def tied(servers, request) -> Iterator[Served]:
    """A server with tied embeddings that accepts weights; its log-probs are of the distribution it samples from."""
    yield from servers.lend("tied", request.node.nodeid)


@pytest.fixture
def untied(servers, request) -> Iterator[Served]:
    """A server with untied embeddings that accepts weights; its log-probs are of the raw logits."""
    yield from servers.lend("untied", request.node.nodeid)
