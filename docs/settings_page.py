"""Generate docs/settings.md from workers/settings: `python docs/settings_page.py > docs/settings.md`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec

from workers import settings
from workers.settings import algorithm
from workers.settings import algorithm as presets

WORDS = {
    "PositiveRange": "[low, high]",
    "Range": "[low, high]",
    "PositiveInt": "integer ≥ 1",
    "NonNegativeInt": "integer ≥ 0",
    "Seconds": "seconds > 0",
    "Fraction": "0 … 1",
    "int": "integer",
    "PositiveFloat": "float > 0",
    "NonNegativeFloat": "float ≥ 0",
    "PositiveLimit": "float > 0",
    "NonNegativeLimit": "float ≥ 0",
    "FiniteFloat": "float",
    "LeaseSeconds": "seconds > 0, at most a day",
    "SamplingSettings": "table",
    "Network": "`off` · `endpoint` · `allowlist` · `open`",
    "tuple[Tracker, ...]": "list of names",
    "tuple[DatasetSettings, ...]": "list of tables",
    "tuple[MeanLevel, Level]": "[mean, std]",
    "tuple[str, ...]": "list of strings",
    "dict[str, str]": "table",
    "dict[str, Any]": "table",
    "dict[TruncationReason, TruncationPolicy]": "table",
    "dict[Rule, PositiveRange]": "table",
    "str": "string",
    "bool": "true / false",
}
"""Type annotations in words."""
NAMED_CHOICES = {"Aggregation": algorithm.Aggregation, "Rule": presets.Rule}
"""Choices of words that have a name in the code."""
CHOICES = {
    "estimator": "Advantage estimator: `name` (default `grpo`) and its options. `penstock algorithms` shows each with "
    "its formula and source.",
    "loss": "Policy loss: `name` (default `clipped`) and its options. `penstock algorithms` shows each with its "
    "formula and source.",
}
COMMON = (
    "run.name",
    "model.path",
    "data.path",
    "data.split",
    "data.prompt",
    "environments",
    "rewards.ref",
    "rewards.weight",
    "rollout.workers",
    "rollout.group_size",
    "rollout.temperature",
    "rollout.max_tokens",
    "rollout.max_turns",
    "engine.server",
    "train.batch_size",
    "train.learning_rate",
    "train.max_steps",
    "train.micro_batch_tokens",
    "train.save_every",
    "estimator.name",
    "algorithm.kl_coefficient",
)
"""The keys that most runs set, in the order of the page."""
HEAD = """# Settings

With this page you can write a settings file, and look up every key. A run is one TOML file:

```toml
[model]
path = "models/my-policy"

[data]
path = "prompts.jsonl"

[environments]
calculator = "calculator"

[train]
batch_size = 16
learning_rate = 1e-6
```

Override any key on the command line: `--set train.learning_rate=1e-5`. Unknown keys, wrong types and combinations that
cannot work are refused before anything starts. The page is generated from the docstrings in `workers/settings/`.
"""


def docstrings() -> dict[str, dict[str, str]]:
    """Return class name -> field name (empty: the class itself) -> docstring."""
    found: dict[str, dict[str, str]] = {}
    for node in _classes():
        fields = found[node.name] = {"": ast.get_docstring(node) or ""}
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = following.value.value if _is_text(following) else ""
                fields[statement.target.id] = " ".join(text.split())
    return found


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _classes() -> Iterator[ast.ClassDef]:
    for file in sorted(Path(settings.__file__).parent.glob("*.py")):
        yield from (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))


def _annotations() -> dict[tuple[str, str], str]:
    return {
        (node.name, statement.target.id): ast.unparse(statement.annotation)
        for node in _classes()
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        value = str(field.default) if isinstance(field.default, float) else msgspec.json.encode(field.default).decode()
    elif field.default_factory is not msgspec.NODEFAULT:
        made = field.default_factory()
        value = "{}" if isinstance(made, settings.Section) else msgspec.json.encode(made).decode()
    else:
        return "required"
    return f"`{value}`"


def _type(annotation: str) -> str:
    """Return an annotation in words; a choice of words as the words."""
    return _words(ast.parse(annotation, mode="eval").body)


def _words(node: ast.expr) -> str:
    text = ast.unparse(node)
    if text in NAMED_CHOICES:
        return " · ".join(f"`{word}`" for word in get_args(NAMED_CHOICES[text]))
    if text in WORDS:
        return WORDS[text]
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{_words(left)} · {_words(right)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=chosen):
            words = [ast.literal_eval(word) for word in (chosen.elts if isinstance(chosen, ast.Tuple) else [chosen])]
            return " · ".join(f"`{word}`" for word in words if word != "")
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, ast.Call(keywords=bounds)])):
            limits = {bound.arg: ast.unparse(bound.value) for bound in bounds}
            between = f" {limits['ge']} … {limits['le']}" if {"ge", "le"} <= limits.keys() else ""
            return f"{_words(kind)}{between}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=parts)):
            return f"[{', '.join(_words(part) for part in parts)}]"
    return text


def page() -> str:
    """Return the whole page."""
    texts = docstrings()
    parts = [HEAD, *_common(texts)]
    for name, kinds in settings.sections().items():
        if not kinds:
            parts += [f"\n## `[{name}]`\n\n{texts['Settings'][name]}"]
        elif len(kinds) > 1:
            parts += [f"\n## `[{name}]`\n\n{CHOICES[name]}\n", "| `name` | | options |", "|---|---|---|"]
            parts += [_choice(kind, texts[kind.__name__]) for kind in kinds]
        else:
            parts += _table(f"[[{name}]]" if name == "rewards" else f"[{name}]", kinds[0], texts)
    return "\n".join(parts) + "\n"


def _common(texts: dict[str, dict[str, str]]) -> list[str]:
    """The table of the keys that most runs set."""
    rows = [f"\n## The {len(COMMON)} keys that most runs set\n", "| key | default | meaning |", "|---|---|---|"]
    for key in COMMON:
        section, _, name = key.partition(".")
        kinds = settings.sections()[section]
        if not kinds or len(kinds) > 1:
            default, text = ("`{}`", texts["Settings"][section]) if not kinds else _chosen(section)
        else:
            (field,) = (f for f in msgspec.structs.fields(kinds[0]) if f.name == name)
            default, text = _default(field), texts[kinds[0].__name__][name]
        rows.append(f"| `{key}` | {default} | {text} |")
    return rows


def _chosen(section: str) -> tuple[str, str]:
    (field,) = (f for f in msgspec.structs.fields(settings.Settings) if f.name == section)
    return f"`{field.default_factory().name}`", CHOICES[section].partition(":")[0] + "."


def _table(heading: str, kind: type[settings.Section], texts: dict[str, dict[str, str]]) -> list[str]:
    annotations = _annotations()
    title = texts[kind.__name__][""].partition(": ")[2] or texts[kind.__name__][""]
    parts = [
        f"\n## `{heading}`\n\n{title[:1].upper()}{title[1:]}\n",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for field in msgspec.structs.fields(kind):
        annotation = _type(annotations[kind.__name__, field.name])
        parts.append(f"| `{field.name}` | {annotation} | {_default(field)} | {texts[kind.__name__][field.name]} |")
    return parts


def _choice(kind: type[settings.Section], texts: dict[str, str]) -> str:
    options = [f"`{f.name} = {_default(f).strip('`')}`: {texts[f.name]}" for f in msgspec.structs.fields(kind)]
    return f"| `{kind.__struct_config__.tag}` | {texts['']} | {'<br>'.join(options)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
