"""The fork server of the tests survives the end of processes that it serves."""

import os
import selectors
import signal
import socket
import subprocess
import sys

from tests.preload.server import Served


def test_a_process_that_ends_while_its_client_sends_a_signal_does_not_end_the_server():
    """One `select` may report both events; handling the first closes the connection that the second would read."""
    client, connection = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with selectors.DefaultSelector() as selector, client:
        Served(selector, connection, child.pid)
        client.send(bytes([signal.SIGTERM]))
        events = selector.select()
        assert len(events) == 2
        for key, _ in sorted(events, key=lambda event: event[0].fileobj is connection):
            key.data()
        assert client.recv(4) == (0).to_bytes(4, "little")
        assert not selector.get_map()
    child.returncode = 0  # the server has reaped it
