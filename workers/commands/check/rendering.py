"""Render reports of `penstock check` for a terminal, shortened; `--json` prints everything."""

import json
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stream.records import RewardPart
from stream.validity import Measured, Reward
from workers.commands.check.check_report import EnvironmentReport, RewardReport, ToolTrial, TurnTrial
from workers.runs.transcript import content_text, escape_controls

_MAX_CHARACTERS = 2000
_MAX_COMPLETION_CHARACTERS = 60


def render_report(report: EnvironmentReport | RewardReport) -> RenderableType:
    """Return the report, with the verdict at the end."""
    parts = _environment(report) if isinstance(report, EnvironmentReport) else _reward(report)
    found = Table.grid(padding=(0, 2))
    for text in report.warnings:
        found.add_row(Text("warning", "bold yellow"), Text(text))
    for text in report.errors:
        found.add_row(Text("error", "bold red"), Text(text))
    parts += [found] if found.row_count else []
    verdict = ("It is usable", "bold green") if report.ok else ("It is not usable", "bold red")
    counts = [_count(report.errors, "error"), _count(report.warnings, "warning")]
    return Group(*parts, Text.assemble(verdict, f": {', '.join(counts)}."))


def _environment(report: EnvironmentReport) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if report.environment:
        found = f", an environment found as {report.reference_kind} {report.ref!r}"
        parts.append(Text.assemble((report.environment, "bold"), found))
    if report.observation is not None:
        joined = (
            ", which follows the prompt's last message without a blank" if isinstance(report.observation, str) else ""
        )
        parts.append(Panel(Text(_short(report.observation)), title=f"reset returned{joined}", title_align="left"))
    elif report.snapshot_bytes is not None:
        parts.append(Text("reset returned nothing: the prompt is the one in the data."))
    parts += [_tool(trial) for trial in report.tools]
    parts += [_turn(trial) for trial in report.turns]
    if report.messages and not report.tools and not report.turns:
        lines = [f"{m['role']:<11}{_short(content_text(m.get('content')))}" for m in report.messages]
        parts.append(Panel(Text("\n".join(lines)), title="its own loop, with a scripted model", title_align="left"))
    elif report.environment and not report.tools and not report.turns and not report.errors:
        parts.append(Text("It has no tools: the model answers once."))
    if report.parts:
        parts.append(_parts(report))
    if report.snapshot_bytes is not None:
        left = f", without {', '.join(report.omitted)}" if report.omitted else ""
        parts.append(Text(f"Its snapshot takes {report.snapshot_bytes:,} bytes{left}."))
    if report.rendered:
        parts.append(Panel(Text(_short(report.rendered)), title="render(snapshot)", title_align="left"))
    return parts


def _reward(report: RewardReport) -> list[RenderableType]:
    if not report.reference_kind:
        return []
    kind = "an async reward function" if report.is_async else "a reward function"
    head = Text.assemble((report.name, "bold"), f", {kind} found as {report.reference_kind} {report.ref!r}")
    asks = Text(f"It asks for {', '.join(report.parameters) or 'nothing by name'}.")
    if not report.trials:
        return [head, asks]
    table = Table("form", "completion", "value", "validity")
    for trial in report.trials:
        text = trial.completion or "(nothing)"
        table.add_row(trial.input_format, Text(text[:_MAX_COMPLETION_CHARACTERS]), *_reward_cells(trial.reward))
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


def _parts(report: EnvironmentReport) -> RenderableType:
    table = Table("get_reward", "value", "validity")
    rows = [(_label(part), part.reward) for part in report.parts]
    if report.reward is not None and len(rows) > 1:
        rows.append(("together", report.reward))
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


def _count(things: list[str], word: str) -> str:
    return f"{len(things) or 'no'} {word}{'' if len(things) == 1 else 's'}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)
    shown = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} … ({len(text):,} characters)"
    return escape_controls(shown)
