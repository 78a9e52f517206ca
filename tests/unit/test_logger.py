"""The package's logger: structlog is imported, and set up, by the first event."""

from structlog.testing import capture_logs

from stream.logger import log, set_up_at_first_event


def test_what_sets_up_the_log_is_called_before_the_first_event_and_once():
    calls = []
    with capture_logs() as lines:
        set_up_at_first_event(lambda: calls.append(len(lines)))
        assert calls == []
        log.info("first.logged", key="value")
        log.info("second.logged")
    assert calls == [0]
    assert [(line["event"], line.get("key")) for line in lines] == [("first.logged", "value"), ("second.logged", None)]
