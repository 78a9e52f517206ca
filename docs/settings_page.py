"""Makes docs/settings.md from workers/settings.py: `python docs/settings_page.py > docs/settings.md`."""

import ast
import sys
from pathlib import Path

import msgspec

from workers import settings

HEAD = """# Settings

Made from the docstrings of `workers/settings.py`; do not edit by hand.

A run is one TOML file. Every key can be overridden on the command line: `--set train.learning_rate=1e-5`. Unknown keys,
wrong types and impossible combinations are refused before anything starts.
"""


def docstrings() -> dict[str, dict[str, str]]:
    """Class name -> field name (or the empty name for the class itself) -> docstring."""
    tree = ast.parse(Path(settings.__file__).read_text())
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = found[node.name] = {"": ast.get_docstring(node) or ""}
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = following.value.value if _is_text(following) else ""
                fields[statement.target.id] = " ".join(text.split())
    return found


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _annotations() -> dict[tuple[str, str], str]:
    tree = ast.parse(Path(settings.__file__).read_text())
    return {
        (node.name, statement.target.id): ast.unparse(statement.annotation)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        value = msgspec.json.encode(field.default).decode()
    elif field.default_factory is not msgspec.NODEFAULT:
        value = msgspec.json.encode(field.default_factory()).decode()
    else:
        return "required"
    return f"`{value}`"


def _type(annotation: str) -> str:
    names = {"Positive": "integer ≥ 1", "Count": "integer ≥ 0", "Seconds": "seconds > 0", "Fraction": "0 … 1"}
    for name, words in names.items():
        annotation = annotation.replace(name, words)
    if annotation.startswith("Literal["):
        return " · ".join(f"`{part.strip(chr(39))}`" for part in annotation[8:-1].split(", "))
    if annotation.startswith("Annotated["):
        return annotation[10:].split(",")[0]
    return annotation.replace("|", "or")


def page() -> str:
    """The whole page."""
    texts, annotations = docstrings(), _annotations()
    parts = [HEAD]
    for section in msgspec.structs.fields(settings.Settings):
        kind = settings.RewardFunction if section.name == "rewards" else section.type
        if not (isinstance(kind, type) and issubclass(kind, settings.Section)):
            parts += [f"\n## `[{section.name}]`\n\n{texts['Settings'][section.name]}"]
            continue
        heading = f"[[{section.name}]]" if section.name == "rewards" else f"[{section.name}]"
        title = texts[kind.__name__][""].partition(": ")[2] or texts[kind.__name__][""]
        parts += [
            f"\n## `{heading}`\n\n{title[:1].upper()}{title[1:]}\n",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for field in msgspec.structs.fields(kind):
            annotation = _type(annotations[kind.__name__, field.name])
            parts.append(f"| `{field.name}` | {annotation} | {_default(field)} | {texts[kind.__name__][field.name]} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
