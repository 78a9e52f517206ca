"""The command `penstock check`: check a reference, print the report, and return an exit code."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from typing import Any, Final

import anyio
import click
import msgspec
from rich.console import Console

from envs.call import CallRunner, Ok
from stream.errors import SettingsError
from workers.commands.check.check_report import LOAD_TIMEOUT_S, EnvironmentReport, RewardReport
from workers.commands.check.environment_check import check_environment
from workers.commands.check.rendering import render_report
from workers.commands.check.reward_check import check_reward, is_reward_function
from workers.rollout.tool_formats.parsed_turn import ToolCall
from workers.runtime.daemon_thread import run_in_daemon_thread
from workers.runtime.exit_codes import ExitCode
from workers.runtime.log_setup import configure_logging
from workers.runtime.loop_watchdog import LoopWatchdog

_BLOCK_S: Final = 0.5
"""Code that keeps the event loop from running so long is named."""


def check_reference(
    ref: str,
    fields: Mapping[str, object] | Iterable[str],
    as_json: bool,
    args: Mapping[str, object] | Iterable[str] = (),
    environment: str = "",
    turns: Sequence[str | ToolCall] = (),
) -> int:
    """Check an environment or a reward function, and print the report.

    Args:
        ref: reference of the environment or the reward function.
        fields: columns of the row, by name or as `name=value` texts; a value that is JSON is decoded.
        as_json: print the report as JSON.
        args: arguments of the factory or the reward function, in the form of `fields`.
        environment: reference of an environment, for a reward function that reads environments.
        turns: texts and calls of the model, for an environment; see `check_environment`.

    Returns:
        The exit code: 0 if the reference is usable, else 1.

    Raises:
        SettingsError: a field or an argument is not of the form `name=value`.
    """
    row, given = parse_pairs(fields, "--field"), parse_pairs(args, "--args")
    configure_logging("check")
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # user code may print
        report = run_in_daemon_thread(partial(_check, ref, row, given, environment, turns))
    if as_json:
        encoded = msgspec.json.encode(report, enc_hook=str)
        click.echo(msgspec.json.format(encoded, indent=2).decode())
    else:
        Console().print(render_report(report))
    return ExitCode.SUCCESS if report.ok else ExitCode.FAILURE


async def _check(
    ref: str, row: dict[str, Any], args: dict[str, Any], environment: str, turns: Sequence[str | ToolCall]
) -> EnvironmentReport | RewardReport:
    outcome = await CallRunner(anyio.CapacityLimiter(1)).call(
        is_reward_function, {"ref": ref, "args": args}, LOAD_TIMEOUT_S
    )
    blocked: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(LoopWatchdog(_BLOCK_S, lambda by, _: blocked.append(by)).watch)
        report: EnvironmentReport | RewardReport
        if isinstance(outcome, Ok) and outcome.value:
            report = await check_reward(ref, row, args=args, environment=environment)
        else:
            report = await check_environment(ref, row, args=args, turns=turns)
        tasks.cancel_scope.cancel()
    report.warnings += [_blocks_text(by) for by in dict.fromkeys(blocked)]
    return report


def _blocks_text(by: str) -> str:
    place, _, name = by.rpartition(" ")
    return (
        f"{name} blocks the event loop ({place}): no deadline can end it, and a worker that it blocks renews no lease; "
        "`await` in it, or write `def` instead of `async def`, which gets a thread"
    )


def parse_call(text: str) -> ToolCall:
    """Return the call that `--call NAME={"argument": value}` names; `--call NAME` has no arguments.

    Raises:
        SettingsError: the arguments are no JSON object.
    """
    name, equals, arguments = text.partition("=")
    try:
        found = msgspec.json.decode(arguments) if equals else {}
    except ValueError as error:
        raise SettingsError(f"--call {text}: the arguments are not JSON: {error}") from error
    if not name or not isinstance(found, dict):
        raise SettingsError(f'--call {text}: write it as NAME={{"argument": value}}')
    return ToolCall(name, found, raw=arguments)


def parse_pairs(given: Mapping[str, object] | Iterable[str], option: str) -> dict[str, Any]:
    """Return values by name, from `name=value` texts; a value that is JSON is decoded.

    Raises:
        SettingsError: a text is not of that form.
    """
    return dict(given) if isinstance(given, Mapping) else dict(_parse_pair(text, option) for text in given)


def _parse_pair(text: str, option: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SettingsError(f"{option} {text}: write it as name=value")
    try:
        return name, msgspec.json.decode(value)
    except ValueError:
        return name, value
