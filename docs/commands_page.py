"""Generate docs/commands.md from the command line's own help: `python docs/commands_page.py > docs/commands.md`."""

import sys
from collections.abc import Iterator

import click

from workers.cli import penstock
from workers.role.exit_codes import ExitCode

HEAD = """# Commands

With this page you can look up every command and option. `penstock COMMAND --help` prints the same.

```sh
penstock run my.toml --set train.learning_rate=1e-5
penstock queues my-run --json
```

RUN is a settings file, a run's folder or its name; without it, most commands that look at a run take the newest one.
`--json` prints JSON for programs. The page is generated from `workers/cli/`.

## Exit codes
"""
MEANINGS = {
    ExitCode.SUCCESS: "done, or stopped as requested",
    ExitCode.FAILURE: "failed, or a check has findings",
    ExitCode.USAGE: "command line, settings, data or user code are wrong; nothing was started",
    ExitCode.RECYCLE: "a worker drained because user code used it up; `penstock run` starts it again",
    ExitCode.PERMANENT: "failed, and a restart would fail the same way",
    ExitCode.UNTRAINED: "the run ended normally, and cannot have learned anything",
    ExitCode.INTERRUPTED: "a second Ctrl-C killed processes that were draining",
}


def commands(group: click.Group, before: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command below a group with its full name, parents first."""
    for name in group.list_commands(click.Context(group)):
        command = group.commands[name]
        yield f"{before} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{before} {name}")


def cell(text: str) -> str:
    """Return a text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def parameters(command: click.Command) -> Iterator[str]:
    """Yield the table of a command's options."""
    context = click.Context(command, help_option_names=["-h", "--help"])
    records = (each.get_help_record(context) for each in command.params if isinstance(each, click.Option))
    rows = [f"| `{cell(names)}` | {cell(text)} |" for names, text in filter(None, records)]
    if rows:
        yield from ("", "| option | meaning |", "|---|---|", *rows)


def described(name: str, command: click.Command) -> Iterator[str]:
    """Yield a command's heading, usage, text and options."""
    usage = " ".join(command.collect_usage_pieces(click.Context(command)))
    yield from ("", f"### {name}", "", "```text", f"{name} {usage}", "```")
    for paragraph in (command.help or "").replace("\b", "").split("\n\n"):
        yield from ("", cell(paragraph).replace("\\|", "|"))
    yield from parameters(command)


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    yield from ("| code | name | meaning |", "|---|---|---|")
    yield from (f"| {code.value} | `{code.name}` | {MEANINGS[code]} |" for code in ExitCode)
    for title, names in penstock.sections.items():
        yield from ("", f"## {title}")
        for name, command in commands(penstock, "penstock"):
            if name.split()[1] in names:
                yield from described(name, command)


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
