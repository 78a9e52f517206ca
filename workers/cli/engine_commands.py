"""`penstock engines`: the engines of a run."""

import click

from workers.cli import options
from workers.cli.command_group import log_errors_only


@click.command(short_help="List a run's engines.")
@options.run
@options.json
def engines(target: str | None, as_json: bool) -> None:
    """List the engines of a run, with health and weights of each. RUN is its folder, settings file or name."""
    from workers.runs.find import open_run
    from workers.terminal.engines import list_engines

    log_errors_only("engines")
    list_engines(open_run(target), as_json=as_json)
