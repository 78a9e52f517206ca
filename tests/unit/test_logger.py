"""What a process logs: events of servers, and warnings of dependencies."""

import io
import json
import subprocess
import sys
from pathlib import Path

import structlog

from workers.role.log_setup import configure_logging, log_nothing


def test_what_servers_write_does_not_change_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    before, bound = structlog.get_config(), structlog.contextvars.get_contextvars()
    monkeypatch.setattr(sys, "stderr", Terminal())
    try:
        configure_logging("rollout")
        structlog.get_logger().info("engine.found", model="\x1b]0;title\x07", max_length=5)
        written = sys.stderr.getvalue()
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(**bound)
    assert "\x1b]0" not in written
    assert r"\x1b]0;title\x07" in written


_ROLE_WITH_AN_OLD_CALL = """
import types
from workers.role.log_setup import configure_logging
configure_logging("rollout")
caller = types.ModuleType("workers.caller")
exec('''
import warnings
def call():
    warnings.warn("`old` is deprecated; use `new`", DeprecationWarning, stacklevel=1)
    return "answered"
''', caller.__dict__)
print([caller.call() for _ in range(3)])
"""


def test_a_caller_without_logging_sees_no_event_and_keeps_its_own_set_up(capfd):
    log = structlog.get_logger()
    with log_nothing():
        log.error("engine.failed")
    assert capfd.readouterr() == ("", "")
    log.info("callers.own")
    assert "callers.own" in capfd.readouterr().out

    configure_logging("check", level="warning")
    with log_nothing():
        log.warning("template.tools_not_rendered")
    assert "template.tools_not_rendered" in capfd.readouterr().err


def test_what_a_dependency_deprecates_is_logged_once_by_a_role_and_fails_no_call():
    run = [sys.executable, "-c", _ROLE_WITH_AN_OLD_CALL]
    result = subprocess.run(run, capture_output=True, text=True, timeout=30, check=True, cwd=Path(__file__).parents[2])
    assert result.stdout == f"{['answered'] * 3}\n"
    (line,) = result.stderr.splitlines()
    event = json.loads(line)
    assert (event["event"], event["category"], event["role"]) == ("python.warned", "DeprecationWarning", "rollout")
    assert event["text"] == "`old` is deprecated; use `new`"
