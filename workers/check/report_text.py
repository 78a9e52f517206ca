"""Reports of checks as lines of text, shortened; `--json` prints everything."""

import json
from collections.abc import Iterator, Sized
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final, TextIO

from rich.console import Console
from rich.text import Text

from stream.validity import Measured, Reward
from stream.wording import escape_controls
from workers.runs.html import html_details, html_table
from workers.runs.transcript import content_text

if TYPE_CHECKING:  # a report is printed by this module
    from workers.check.report import CheckReport, EnvironmentTrial, ProgramTrial, RewardTrial, ToolTrial

_MAX_CHARACTERS: Final = 2000
_LINE: Final = 160
"""Characters of a message of an agent program."""
_INDENT: Final = "    "
_STYLES: Final = {"error": "red", "warning": "yellow", True: "bold green", False: "bold red"}

Line = tuple[str, str]
"""A text of one or more lines, and its style in a terminal."""


def report_text(report: "CheckReport") -> str:
    """Return the report as plain text."""
    return "\n".join(text for text, _ in _lines(report))


def report_html(report: "CheckReport") -> str:
    """Return verdict and findings as a table, and the whole report below it."""
    findings = [(each.level, each.subject, each.place, each.text) for each in report.findings]
    header = ("", "subject", "place", "message") if findings else ()
    caption = f"{report.kind} {report.target}: {'usable' if report.ok else 'not usable'}"
    return html_table(caption, header, findings) + html_details("everything that was tried", report_text(report))


def print_report(report: "CheckReport", file: TextIO | None = None) -> None:
    """Print the report, by default on stdout."""
    console = Console(file=file, highlight=False)
    for text, style in _lines(report):
        console.print(Text(text, style), soft_wrap=True)


def _lines(report: "CheckReport") -> Iterator[Line]:
    """Yield what was tried, the findings with the tracebacks of errors, and the verdict."""
    is_file = report.kind == "settings file"
    for name, environment in report.environments.items() if is_file else ():
        if environment.program is not None:
            yield f"environment {name}", "bold"
            yield from _program(environment.program)
    if report.kind == "environment":
        for environment in report.environments.values():
            yield from _environment(environment, report)
    for reward in () if is_file else report.rewards.values():
        yield from _reward(reward, report)
    for finding in report.findings:
        yield escape_controls(str(finding)), _STYLES[finding.level]
        if finding.level == "error" and finding.cause is not None and finding.cause.traceback:
            yield _indented(finding.cause.traceback), ""
    if is_file and report.checked:
        yield f"checked in {report.seconds:.1f} s: {', '.join(report.checked)}", ""
    verdict = (
        f"The run can{'' if report.ok else 'not'} start" if is_file else f"It is {'' if report.ok else 'not '}usable"
    )
    yield f"{verdict}: {_count(report.errors, 'error')}, {_count(report.warnings, 'warning')}.", _STYLES[report.ok]


def _environment(trial: "EnvironmentTrial", report: "CheckReport") -> Iterator[Line]:
    yield f"{trial.environment}, an environment found as {trial.reference_kind} {report.target!r}", "bold"
    if trial.observation is not None:
        is_text = isinstance(trial.observation, str)
        joined = ", which follows the prompt's last message without a blank" if is_text else ""
        yield f"reset returned{joined}:", ""
        yield _indented(trial.observation), "cyan"
    elif trial.snapshot_bytes is not None:
        yield "reset returned nothing: the prompt is the one in the data.", ""
    for tool in trial.tools:
        yield from _tool(tool)
    for turn in trial.turns:
        yield "a turn without a call", "bold"
        yield _indented(f"{turn.said} -> {turn.failure or turn.reply}{_ends(turn.ends)}"), _style(turn.failure)
    if not trial.tools and not trial.turns:
        yield from _without_tools(trial, report)
    rewards = [(part.name + ("" if part.turn is None else f", turn {part.turn}"), part.reward) for part in trial.parts]
    if trial.reward is not None and len(rewards) > 1:
        rewards.append(("together", trial.reward))
    for name, reward in rewards:
        yield f"get_reward: {name}: {_value(reward)}", _style(not isinstance(reward, Measured))
    if trial.snapshot_bytes is not None:
        without = f", without {', '.join(trial.omitted)}" if trial.omitted else ""
        yield f"Its snapshot takes {trial.snapshot_bytes:,} bytes{without}.", ""
    if trial.rendered:
        yield "render(snapshot):", ""
        yield _indented(trial.rendered), "cyan"


def _without_tools(trial: "EnvironmentTrial", report: "CheckReport") -> Iterator[Line]:
    if trial.messages:
        yield "its own loop, with a scripted model:", ""
        for message in trial.messages:
            said = content_text(message.get("content"))
            if trial.program is not None:  # prompts of programs are long
                said = shorten(said, _LINE, placeholder=f" … ({len(said):,} characters)")
            yield _indented(f"{message['role']:<11}{said}"), "cyan"
    if trial.program is not None:
        yield from _program(trial.program)
    elif not trial.messages and report.ok:
        yield "It has no tools: the model answers once.", ""


def _program(trial: "ProgramTrial") -> Iterator[Line]:
    yield "an agent program in a sandbox, with a scripted model:", ""
    first = "" if trial.first_s is None else f", the first after {trial.first_s:.1f} s"
    for route, count in trial.routes.items():
        yield _indented(f"{route:<32} {_count(range(count), 'request')}{first}"), "cyan"
        first = ""
    rows, turns = ", ".join(f"{length:,}" for length in trial.rows), _count(range(trial.turns), "turn")
    unit = "tokens" if trial.has_model else "bytes without tools"
    merged = f"{', '.join(trial.roles)}: a part of the message before" if trial.roles else "none"
    facts = (
        ("refused", "; ".join(trial.refused) or "nothing"),
        ("roles that the template refuses", merged if trial.has_model else "not known without a model"),
        ("fields without effect", ", ".join([*trial.ignored, *trial.unknown]) or "none"),
        ("connections elsewhere", ", ".join(trial.elsewhere) or "none seen"),
        ("turns and rows", f"{turns} in {_count(trial.rows, 'row')}, of {rows or 0} {unit}"),
        ("exit code", "none" if trial.exit_code is None else str(trial.exit_code)),
    )
    for name, value in facts:
        yield _indented(f"{name:<32} {value}"), ""
    if trial.untouched_reward is not None:
        yield _indented(f"{'reward of the untouched folder':<32} {trial.untouched_reward:g}"), ""


def _reward(trial: "RewardTrial", report: "CheckReport") -> Iterator[Line]:
    kind = "an async reward function" if trial.is_async else "a reward function"
    yield f"{trial.name}, {kind} found as {trial.reference_kind} {report.target!r}", "bold"
    yield f"It asks for {', '.join(trial.parameters) or 'nothing by name'}.", ""
    for sample in trial.samples:
        text = f"{sample.input_format:<8} {sample.completion or '(nothing)'} -> {_value(sample.reward)}"
        yield _indented(text), _style(not isinstance(sample.reward, Measured))


def _tool(trial: "ToolTrial") -> Iterator[Line]:
    function = trial.schema["function"]
    shape = function["parameters"]
    yield f"tool {trial.name}: {trial.description or '(no docstring)'}", "bold"
    for name, schema in shape.get("properties", {}).items():
        default = f" = {json.dumps(schema['default'], ensure_ascii=False)}" if "default" in schema else ", optional"
        needed = "" if name in shape.get("required", ()) else default
        meaning = schema.get("description", "")
        yield _indented(f"{name}: {schema_summary(schema)}{needed}{f'. {meaning}' * bool(meaning)}"), ""
    if returns := function.get("return", {}).get("description"):
        yield _indented(f"Returns: {returns}"), ""
    arguments = ", ".join(f"{name}={value!r}" for name, value in trial.arguments.items())
    returned = f"  ({trial.returned})" if trial.returned else ""
    reply = f"{trial.name}({arguments}) -> {trial.failure or trial.reply}{returned}{_ends(trial.ends)}"
    yield _indented(reply), "yellow" if trial.is_error else _style(trial.failure)


def schema_summary(schema: Any) -> str:
    """Return a JSON schema as one line, for example `{name: string, price?: integer} | null`."""
    if not isinstance(schema, dict) or not schema:
        return "anything"
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(map(schema_summary, options))
    kind = schema.get("type", "anything")
    if kind == "array":
        return _array_kind(schema)
    if kind == "object":
        return _object_kind(schema)
    words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "format": "as"}
    bounds = [f" {words[key]} {value}" for key, value in schema.items() if key in words]
    return f"{kind if isinstance(kind, str) else ' | '.join(kind)}{','.join(bounds)}"


def _array_kind(schema: dict[str, Any]) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(map(schema_summary, schema['prefixItems']))}]"
    return f"[{schema_summary(schema['items'])}, ...]" if "items" in schema else "array"


def _object_kind(schema: dict[str, Any]) -> str:
    needed, free = schema.get("required", ()), schema.get("additionalProperties")
    fields = [f"{n}{'' if n in needed else '?'}: {schema_summary(s)}" for n, s in schema.get("properties", {}).items()]
    fields += [f"...: {schema_summary(free)}"] if isinstance(free, dict) else []
    return f"{{{', '.join(fields)}}}" if fields else "object"


def _value(reward: Reward) -> str:
    if isinstance(reward, Measured):
        return f"{reward.value:g}"
    return f"invalid, {reward.reason}: {reward.detail}".removesuffix(": ")


def _style(failed: object) -> str:
    return "red" if failed else "green"


def _ends(ends: bool) -> str:
    return "  (the episode is over)" if ends else ""


def _count(findings: Sized, word: str) -> str:
    return f"{len(findings) or 'no'} {word}{'' if len(findings) == 1 else 's'}"


def _indented(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)
    shown = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} … ({len(text):,} characters)"
    return "\n".join(f"{_INDENT}{line}" for line in escape_controls(shown).splitlines())
