"""`penstock.run` prints what the child process prints, nothing if it is quiet, and raises its error."""

import sys

import pytest

import penstock
from stream.errors import RunFailedError

START = "import sys; print('new run test in runs/test', file=sys.stderr, flush=True); "
ENDS = {
    "error": (START + "sys.exit('error: the disk is full\\nmake room')", "the disk is full\nmake room"),
    "traceback": (
        START + "raise KeyError('lost')",
        "exit code 1\nnew run test in runs/test\nTraceback (.*)KeyError: 'lost'",
    ),
    "kill": (START + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9\nnew run test"),
}


@pytest.fixture(params=ENDS.values(), ids=ENDS)
def child(request, monkeypatch):
    code, message = request.param
    monkeypatch.setattr("workers.launch.run_process.penstock_command", lambda: (sys.executable, "-c", code))
    return message


def test_a_quiet_run_prints_nothing_and_its_error_has_what_it_would_have_printed(child, capfd):
    with pytest.raises(RunFailedError, match=f"(?s){child}"):
        penstock.run("run.toml", quiet=True)
    assert capfd.readouterr() == ("", "")


def test_a_run_prints_its_lines_as_they_come(child, capfd):
    with pytest.raises(RunFailedError, match=child.partition("\n")[0]):
        penstock.run("run.toml")
    assert capfd.readouterr().out.startswith("new run test in runs/test\n")
