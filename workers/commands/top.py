"""`penstock top`: a run's queues and what is in flight, live on the whole terminal. Read-only.

Without a terminal it prints one JSON object per second.
"""

import sys
from typing import Final

import anyio
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from stream.connection.run_connection import RunConnection
from stream.operator.run_status import RunStatus, read_status
from workers.run.run_info import find_run, with_run
from workers.runs.status import in_flight_report, queue_report
from workers.terminal.output import make_console, print_json
from workers.terminal.queues import first_status, render_in_flight, render_queues

_INTERVAL_S: Final = 1.0


def show_top(target: str | None, redis: str, *, stuck_s: float, as_json: bool = False) -> None:
    """Show a run until it has finished or Ctrl-C is pressed.

    Args:
        target: folder, settings file or name of the run.
        redis: URL of its server, if its folder does not name it.
        stuck_s: seconds after which an activity is marked.
        as_json: print JSON lines on a terminal, too.
    """
    location = find_run(target, redis)
    prints_lines = as_json or not sys.stdout.isatty()

    async def show(connection: RunConnection) -> None:
        await (_print_lines(connection, stuck_s) if prints_lines else _show_screen(connection, stuck_s))

    try:
        with_run(location, show)
    except KeyboardInterrupt:
        return


class TopScreen:
    """One status on the whole terminal: the queues, and as many activities as there are lines left.

    It is laid out anew at each drawing, so it fits after the terminal was resized.

    Args:
        run: name of the run.
        status: with the reports of workers.
        stuck_s: seconds after which an activity is marked.
    """

    def __init__(self, run: str, status: RunStatus, stuck_s: float) -> None:
        self._run, self._status, self._stuck_s = run, status, stuck_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        queues = Group(render_queues(self._run, self._status), Text())
        used = len(console.render_lines(queues, options.update(height=None), pad=False))
        room = options.max_height - used - 2  # the table's heading, and the line below it
        yield queues
        if room > 0:
            yield render_in_flight(self._status, room, self._stuck_s)


async def _show_screen(connection: RunConnection, stuck_s: float) -> None:
    console = make_console()
    status = await first_status(connection)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(TopScreen(connection.run, status, stuck_s), refresh=True)
            if status.meta.get("finished"):
                break
            await anyio.sleep(_INTERVAL_S)
            status = await read_status(connection, with_in_flight=True)
    console.print(render_queues(connection.run, status))


async def _print_lines(connection: RunConnection, stuck_s: float) -> None:
    status = await first_status(connection)
    while True:
        in_flight = in_flight_report(connection.run, status, stuck_s)
        print_json({"queues": queue_report(connection.run, status), "in_flight": in_flight})
        if status.meta.get("finished"):
            return
        await anyio.sleep(_INTERVAL_S)
        status = await read_status(connection, with_in_flight=True)
