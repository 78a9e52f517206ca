"""Makes docs/settings.md from the files of workers/settings: `python docs/settings_page.py > docs/settings.md`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec

from workers import settings
from workers.settings import algorithm, presets

LITERALS = {"Aggregation": algorithm.Aggregation, "Level": algorithm.Level, "Rule": presets.Rule}
CHOICES = {
    "estimator": "How rewards become advantages: `name` (default `grpo`) and the options of that one. `penstock "
    "estimators` shows each with its formula and source.",
    "loss": "The policy loss: `name` (default `clipped`) and the options of that one. `penstock algorithms` shows each "
    "with its formula and source.",
}
HEAD = """# Settings

Made from the docstrings in `workers/settings/`; do not edit by hand.

A run is one TOML file. Every key can be overridden on the command line: `--set train.learning_rate=1e-5`. Unknown keys,
wrong types and impossible combinations are refused before anything starts.
"""


def docstrings() -> dict[str, dict[str, str]]:
    """Class name -> field name (or the empty name for the class itself) -> docstring."""
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
        value = msgspec.json.encode(field.default_factory()).decode()
    else:
        return "required"
    return f"`{value}`"


def _type(annotation: str) -> str:
    names = {
        "Positive": "integer ≥ 1",
        "Count": "integer ≥ 0",
        "Seconds": "seconds > 0",
        "Fraction": "0 … 1",
        "Above0": "float > 0",
        "Least0": "float ≥ 0",
    }
    for name, words in names.items():
        annotation = annotation.replace(name, words)
    literals = {name: " · ".join(f"`{a}`" for a in get_args(kind)) for name, kind in LITERALS.items()}
    annotation = literals.get(annotation, annotation)
    if annotation.startswith("Literal["):
        return " · ".join(f"`{part.strip(chr(39))}`" for part in annotation[8:-1].split(", "))
    if annotation.startswith("Annotated["):
        return annotation[10:].split(",")[0]
    return annotation.replace("|", "or")


def page() -> str:
    """The whole page."""
    texts = docstrings()
    parts = [HEAD]
    for name, kinds in settings.sections().items():
        if not kinds:
            parts += [f"\n## `[{name}]`\n\n{texts['Settings'][name]}"]
        elif len(kinds) > 1:
            parts += [f"\n## `[{name}]`\n\n{CHOICES[name]}\n", "| `name` | | options |", "|---|---|---|"]
            parts += [_choice(kind, texts[kind.__name__]) for kind in kinds]
        else:
            parts += _table(f"[[{name}]]" if name == "rewards" else f"[{name}]", kinds[0], texts)
        if name == "correction":
            parts += _table("[[correction.reject]]", settings.Rejection, texts)
    return "\n".join(parts) + "\n"


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
