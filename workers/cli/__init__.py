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

from workers.cli import dead, engines, measuring, runs, starting
from workers.cli.group import Commands
from workers.installation import check_installation, own_packages_first


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock")
def penstock() -> None:
    """Async streaming rollout pipeline for reinforcement learning on language models."""
    check_installation()


for _command in (  # in the order of `penstock --help`
    starting.demo,
    starting.run,
    runs.queues,
    runs.pause,
    runs.resume,
    runs.stop,
    runs.audit,
    runs.replay,
    runs.acl,
    engines.engines,
    dead.dead,
    measuring.check,
    measuring.estimators,
    runs.export,
    measuring.evaluate,
    starting.serve,
    measuring.rewardbench,
    measuring.rescore,
    starting.feed,
    starting.rollout,
    starting.score,
    starting.train,
):
    penstock.add_command(_command)


def main() -> None:
    """The console script."""
    own_packages_first()
    penstock(prog_name="penstock")
