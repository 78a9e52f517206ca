"""Reports of checks as text for a terminal, shortened; `--json` prints everything."""

import json
from io import StringIO
from typing import Any, Final, TextIO

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stream.records import RewardPart
from stream.validity import Measured, Reward
from workers.check.report import CheckFinding, CheckReport, EnvironmentTrial, RewardTrial, ToolTrial, TurnTrial
from workers.runtime.transcript import content_text, escape_controls

_MAX_CHARACTERS: Final = 2000
_MAX_COMPLETION_CHARACTERS: Final = 60
_WIDTH: Final = 100
"""Of a report as a plain string."""
_STYLES: Final = {"error": "bold red", "warning": "bold yellow"}


def report_text(report: CheckReport) -> str:
    """Return the report as plain text."""
    file = StringIO()
    print_report(report, file, width=_WIDTH)
    return file.getvalue()


def print_report(report: CheckReport, file: TextIO | None = None, width: int | None = None) -> None:
    """Print what was tried, the findings with the tracebacks of errors, and the verdict; by default on stdout."""
    console = Console(file=file, width=width, highlight=False)
    if report.kind != "settings file":
        for environment in report.environments.values() if report.kind == "environment" else ():
            console.print(*_environment(environment, report), sep="\n")
        for reward in report.rewards.values():
            console.print(*_reward(reward, report), sep="\n")
    for finding in report.findings:
        console.print(_finding(finding), soft_wrap=True)
    if report.checked and report.kind == "settings file":
        console.print(f"checked in {report.seconds:.1f} s: {', '.join(report.checked)}", soft_wrap=True, markup=False)
    counts = [_count(report.errors, "error"), _count(report.warnings, "warning")]
    subject = "The run can start" if report.kind == "settings file" else "It is usable"
    refusal = "The run cannot start" if report.kind == "settings file" else "It is not usable"
    verdict = (subject, "bold green") if report.ok else (refusal, "bold red")
    console.print(Text.assemble(verdict, f": {', '.join(counts)}."))


def _finding(finding: CheckFinding) -> Text:
    text = escape_controls(str(finding))
    line = Text.assemble((finding.level, _STYLES[finding.level]), text.removeprefix(finding.level))
    if finding.level == "error" and finding.cause is not None and finding.cause.traceback:
        for trace in finding.cause.traceback.splitlines():
            line.append(f"\n    {escape_controls(trace)}")
    return line


def _environment(trial: EnvironmentTrial, report: CheckReport) -> list[RenderableType]:
    place = f", an environment found as {trial.reference_kind} {report.target!r}"
    parts: list[RenderableType] = [Text.assemble((trial.environment, "bold"), place)]
    if trial.observation is not None:
        joined = (
            ", which follows the prompt's last message without a blank" if isinstance(trial.observation, str) else ""
        )
        parts.append(Panel(Text(_short(trial.observation)), title=f"reset returned{joined}", title_align="left"))
    elif trial.snapshot_bytes is not None:
        parts.append(Text("reset returned nothing: the prompt is the one in the data."))
    parts += [_tool(tool) for tool in trial.tools]
    parts += [_turn(turn) for turn in trial.turns]
    if trial.messages and not trial.tools and not trial.turns:
        lines = [f"{m['role']:<11}{_short(content_text(m.get('content')))}" for m in trial.messages]
        parts.append(Panel(Text("\n".join(lines)), title="its own loop, with a scripted model", title_align="left"))
    elif not trial.tools and not trial.turns and report.ok:
        parts.append(Text("It has no tools: the model answers once."))
    if trial.parts:
        parts.append(_parts(trial))
    if trial.snapshot_bytes is not None:
        left = f", without {', '.join(trial.omitted)}" if trial.omitted else ""
        parts.append(Text(f"Its snapshot takes {trial.snapshot_bytes:,} bytes{left}."))
    if trial.rendered:
        parts.append(Panel(Text(_short(trial.rendered)), title="render(snapshot)", title_align="left"))
    return parts


def _reward(trial: RewardTrial, report: CheckReport) -> list[RenderableType]:
    kind = "an async reward function" if trial.is_async else "a reward function"
    head = Text.assemble((trial.name, "bold"), f", {kind} found as {trial.reference_kind} {report.target!r}")
    asks = Text(f"It asks for {', '.join(trial.parameters) or 'nothing by name'}.")
    if not trial.samples:
        return [head, asks]
    table = Table("form", "completion", "value", "validity")
    for sample in trial.samples:
        text = sample.completion or "(nothing)"
        table.add_row(sample.input_format, Text(text[:_MAX_COMPLETION_CHARACTERS]), *_reward_cells(sample.reward))
    return [head, asks, table]


def _tool(trial: ToolTrial) -> RenderableType:
    function = trial.schema["function"]
    shape = function["parameters"]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, schema in shape.get("properties", {}).items():
        needed = "required" if name in shape.get("required", ()) else _default(schema)
        kind = Text(schema_summary(schema), "cyan")
        table.add_row(Text(name, "bold"), needed, kind, Text(schema.get("description", "")))
    reply = trial.failure or trial.reply
    notes = [trial.returned, "the episode is over" if trial.ends else ""]
    style = "red" if trial.failure else "yellow" if trial.is_error else "green"
    call = f"{trial.name}({', '.join(f'{name}={value!r}' for name, value in trial.arguments.items())})"
    example = Text.assemble((escape_controls(call), "bold"), " -> ", (_short(reply), style))
    if any(notes):
        example.append(f"  ({'; '.join(filter(None, notes))})", "bright_black")
    lines = [Text(trial.description or "(no docstring)", "" if trial.description else "yellow")]
    if returns := function.get("return", {}).get("description"):
        lines.append(Text(f"Returns: {returns}"))
    body = Group(*lines, table, example) if table.row_count else Group(*lines, example)
    return Panel(body, title=Text(f"tool {trial.name}"), title_align="left")


def _turn(trial: TurnTrial) -> RenderableType:
    end = "the episode is over" if trial.ends else ""
    reply = trial.failure or trial.reply
    lines = [Text.assemble((_short(trial.said), "bold"), " -> ", (_short(reply), "red" if trial.failure else "green"))]
    if end:
        lines.append(Text(end, "bright_black"))
    return Panel(Group(*lines), title="a turn without a call", title_align="left")


def _default(schema: dict[str, Any]) -> str:
    return f"= {json.dumps(schema['default'], ensure_ascii=False)}" if "default" in schema else "optional"


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


def _parts(trial: EnvironmentTrial) -> RenderableType:
    table = Table("get_reward", "value", "validity")
    rows = [(_label(part), part.reward) for part in trial.parts]
    if trial.reward is not None and len(rows) > 1:
        rows.append(("together", trial.reward))
    for name, reward in rows:
        table.add_row(Text(name), *_reward_cells(reward))
    return table


def _reward_cells(reward: Reward) -> tuple[str, Text]:
    """Return the cells for value and validity."""
    if isinstance(reward, Measured):
        return f"{reward.value:g}", Text("valid", style="green")
    return "-", Text(f"{reward.reason}: {reward.detail}" if reward.detail else str(reward.reason), style="red")


def _label(part: RewardPart) -> str:
    return part.name if part.turn is None else f"{part.name}, turn {part.turn}"


def _count(findings: list[CheckFinding], word: str) -> str:
    return f"{len(findings) or 'no'} {word}{'' if len(findings) == 1 else 's'}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)
    shown = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} … ({len(text):,} characters)"
    return escape_controls(shown)
