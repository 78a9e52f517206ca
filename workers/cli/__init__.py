"""The command `penstock`.

Every command imports its modules when it runs, so `penstock --help` is fast and `penstock queues` needs neither torch
nor a model. Exit codes are those of `workers.role.exit_codes.ExitCode`.
"""

import click

from workers.cli import look, measure, operate, start
from workers.cli.command_group import CommandGroup, exit_process


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock")
def penstock() -> None:
    """Async streaming rollout pipeline for reinforcement learning on language models."""


penstock.add_section("Try an environment or a reward", measure.check, measure.play, measure.algorithms)
penstock.add_section(
    "Train on one machine",
    start.demo,
    start.init,
    start.base_model,
    start.run,
    look.export,
    measure.evaluate,
)
penstock.add_section(
    "Look at a run",
    look.dashboard,
    look.runs,
    look.show,
    look.queues,
    operate.engines,
    operate.sandboxes,
    look.groups,
    look.logs,
    look.audit,
    look.replay,
    look.export_groups,
    look.trace,
)
penstock.add_section(
    "Control a run",
    operate.pause,
    operate.resume,
    operate.stop,
    operate.dead,
)
penstock.add_section("Score again", measure.rescore, measure.rewardbench)
penstock.add_section(
    "Train on several machines",
    start.serve,
    start.feed,
    start.rollout,
    start.score,
    start.train,
)


def main() -> None:
    """Run the command and exit without tearing down the interpreter; the console script calls this."""
    try:
        penstock(prog_name="penstock")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            exit_process(end.code or 0)
        raise
