"""Generate docs/records.md from the docstrings of the records: `python docs/records_page.py > docs/records.md`."""

import ast
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stream import records, validity

ORDER = (
    "Prompt", "Group", "Completion", "Row", "Span", "Branch", "RewardPart", "Failure", "ToolRun", "ActivityTime",
    "TrainedCompletion", "TrainedRow", "Measured", "Unmeasured",
)  # fmt: skip
"""Records in the order of the page."""
REASONS = ("BranchRole", "DiscardReason", "RewardReason", "RolloutReason", "TruncationReason", "DropReason")
HEAD = """# Records

With this page you can read what travels through the queues and stands in the archive. For example, the reward of every
completion of a run:

```python
from pathlib import Path

from stream.codec import decode
from stream.records import Group
from stream.trainer.archive import scan_archive

for record, offset in scan_archive(Path("runs/my-run/groups")):
    group = decode(offset.read_payload(), Group)
    print(group.prompt.id, [completion.reward for completion in group.completions])
```

Records are msgpack, written by `stream.codec`. New fields have defaults, and unknown fields are ignored, so workers of
two versions can share a run. A reader gives back records of a newer major version (`SCHEMA`). The page is generated
from `stream/records.py` and `stream/validity.py`."""


def classes() -> dict[str, ast.ClassDef]:
    """Return the classes of both modules by name."""
    trees = [ast.parse(Path(str(module.__file__)).read_text()) for module in (records, validity)]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def one_line(text: str) -> str:
    """Return a docstring's text as one line of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def meanings(node: ast.ClassDef) -> dict[str, str]:
    """Return the docstring below each field."""
    return {
        field.target.id: one_line(str(text.value.value))
        for field, text in itertools.pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def default(field: msgspec.structs.FieldInfo) -> str:
    """Return a field's default as the table shows it."""
    if field.default is not msgspec.NODEFAULT:
        return f"`{field.default!r}`"
    return "required" if field.default_factory is msgspec.NODEFAULT else f"`{field.default_factory()!r}`"


def record(name: str, node: ast.ClassDef) -> Iterator[str]:
    """Yield the lines of one record."""
    text, *examples = re.split(r"\n\n(?=Example)", ast.get_docstring(node) or "")
    yield from ("", f"## {name}", "", text)
    for example in examples:
        title, _, body = example.partition("\n")
        yield from ("", f"{title.rstrip(':')}:", "", "```text", textwrap.dedent(body).strip("\n"), "```")
    annotations = {
        each.target.id: one_line(ast.unparse(each.annotation))
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    texts = meanings(node)
    yield from ("", "| field | type | default | meaning |", "|---|---|---|---|")
    kind = getattr(records, name, None) or getattr(validity, name)
    for field in msgspec.structs.fields(kind):
        yield f"| `{field.name}` | `{annotations[field.name]}` | {default(field)} | {texts[field.name]} |"


def reasons(node: ast.ClassDef) -> Iterator[str]:
    """Yield the table of one enumeration; the comment beside a member is its meaning."""
    module = validity if hasattr(validity, node.name) else records
    source = Path(str(module.__file__)).read_text().splitlines()
    yield from ("", f"## {node.name}", "", ast.get_docstring(node) or "", "", "| value | meaning |", "|---|---|")
    for member in node.body:
        if isinstance(member, ast.Assign):
            comment = source[member.lineno - 1].partition("  # ")[2]
            yield f"| `{ast.literal_eval(member.value)}` | {comment} |"


def page() -> str:
    """Return the whole page."""
    found = classes()
    parts = [HEAD]
    for name in ORDER:
        parts += record(name, found[name])
    for name in REASONS:
        parts += reasons(found[name])
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
