"""The command `penstock`.

Every command imports what it needs when it runs, so that `penstock --help` is there at once and `penstock queues` needs
neither torch nor a model. Exit codes: 0 done; 1 failed; 2 the command line or the settings are at fault, and nothing
was started.

==============  ======================================================================
`group.py`      what all commands share: logging, errors, the end of the process
`options.py`    options and arguments that several have
`starting.py`   start something: a demo, a run, one of its roles, an engine
`runs.py`       look at a run that there is, steer it, replay it, take its model out
`engines.py`    its engines
`dead.py`       its dead letters
`measuring.py`  try and measure: environments, reward functions, policies
==============  ======================================================================
"""

import click

from workers.cli import dead_letter_commands, engine_commands, measure_commands, run_commands, start_commands
from workers.cli.command_group import CommandGroup
from workers.cli.installation import check_package_origin, put_working_directory_last


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock")
def penstock() -> None:
    """Async streaming rollout pipeline for reinforcement learning on language models."""
    check_package_origin()


for _command in (  # in the order of `penstock --help`
    start_commands.demo,
    start_commands.run,
    run_commands.queues,
    run_commands.pause,
    run_commands.resume,
    run_commands.stop,
    run_commands.audit,
    run_commands.replay,
    run_commands.acl,
    engine_commands.engines,
    dead_letter_commands.dead,
    measure_commands.check,
    measure_commands.algorithms,
    run_commands.export,
    measure_commands.evaluate,
    start_commands.serve,
    measure_commands.rewardbench,
    measure_commands.rescore,
    start_commands.feed,
    start_commands.rollout,
    start_commands.score,
    start_commands.train,
):
    penstock.add_command(_command)


def main() -> None:
    """The console script."""
    put_working_directory_last()
    penstock(prog_name="penstock")
