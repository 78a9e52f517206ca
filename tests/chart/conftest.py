"""Fixtures of the chart's tests."""

import subprocess

import pytest

from tests.chart.rendered import Chart


@pytest.fixture(scope="session")
def chart():
    try:
        return Chart()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"tests/chart/setup.sh cannot fetch Helm and the schemas: {error}")
