"""`docs/python.ipynb`, executed in a fresh kernel as a reader does: from an empty folder to the worst group."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.e2e.harness import environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

NOTEBOOK = Path(__file__).parents[2] / "docs" / "python.ipynb"
LIMIT_S = 400
"""Of one cell."""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return the outputs of each code cell by the beginning of its last line."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment())
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.source.splitlines()[-1].partition("(")[0]: cell.outputs for cell in cells}


def shown(output, kind="text/html"):
    """Return what the last value of a cell shows."""
    (data,) = [each.data for each in output if "data" in each]
    return data[kind]


def printed(output):
    return "".join(each.text for each in output if each.output_type == "stream")


def test_it_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


def test_every_cell_runs_and_shows_its_value(outputs):
    assert "thermostat.py:Thermostat: usable" in shown(outputs["penstock.check"])
    played = outputs["penstock.play"]
    assert "It should have 20." in shown(played)
    assert shown(played, "text/plain").startswith("Group('play:0:0', rewards: ")
    assert "the run finished" in shown(outputs["penstock.run"])
    assert "run thermostat" in shown(outputs["run"])
    assert len(shown(outputs["plt.show"], "image/png")) > 1000
    assert "trained" in shown(outputs["worst"])
    assert printed(outputs["print"]).startswith("user: The room has ")


def test_progress_is_plain_lines(outputs):
    lines = printed(outputs["penstock.run"])
    assert "\x1b" not in lines
    assert "\r" not in lines
    assert "new run thermostat in runs/thermostat" in lines
    assert "step" in lines


def test_nothing_else_is_printed(outputs):
    """But what a library that counts downloads warns of where ipywidgets is missing."""
    for name in ("penstock.check", "penstock.play", "run", "worst", "plt.show"):
        lines = [line for line in printed(outputs[name]).splitlines() if "tqdm" not in line]
        assert lines == [], name
