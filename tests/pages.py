"""The repository's pages and their blocks of code, and which test runs each block.

A block of `sh` or `python` is run by a test, or the comment before it, which readers do not see, says why it is not:

    <!-- not run: needs a Kubernetes cluster -->
    ```sh
    helm uninstall my-run
    ```

A new block needs no registration: `tests/e2e/test_docs_commands.py` runs every block of `sh` that is neither marked nor
in `RUN_BY`, and `tests/unit/test_docs_code.py` every block of `python` that is neither marked nor in `PYTHON_RUN_BY`.
Blocks of settings and data are loaded (test_docs_settings.py, test_docs_code.py); `text`, or no language, is output.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [path for folder in ("envs", "examples", "plugins") for path in sorted((ROOT / folder).rglob("README.md"))]

RUN_BY = {
    "README.md: git clone": "tests/e2e/test_first_hour.py",
    "README.md: . .venv/bin/activate": "tests/e2e/test_first_hour.py",
    "docs/first-hour.md": "tests/e2e/test_first_hour.py",
    "docs/index.md": "tests/e2e/test_first_hour.py",
    "docs/resuming.md: penstock run": "tests/e2e/test_docs_commands.py",
    "docs/training.md: .venv/bin/pytest": "tests/e2e/test_own_estimator.py",
    "docs/watching.md: penstock queues  ": "tests/e2e/test_readme.py",
    "examples/own_trainer/README.md": "tests/e2e/test_own_trainer.py",
    "examples/reward_model/README.md": "tests/e2e/test_reward_model_run.py",
}
"""The test that runs a page's blocks of `sh`, or the one that begins so; test_docs_commands.py runs all others."""
PYTHON_RUN_BY = {
    "README.md": "tests/e2e/test_readme.py",
    "docs/first-hour.md": "tests/e2e/test_first_hour.py",
    "docs/training.md": "tests/e2e/test_own_estimator.py",
    "docs/python.md": "tests/e2e/test_docs_commands.py",
    "docs/records.md": "tests/e2e/test_docs_commands.py",
    "docs/run-folder.md": "tests/e2e/test_docs_commands.py",
}
"""The test that runs a page's blocks of `python`; test_docs_code.py runs all others."""

READERS_FILES = {
    "counter.py",
    "envs/till.py",
    "examples/own_env",
    "held_out.jsonl",
    "models/base",
    "models/my-policy",
    "models/reward",
    "my-policy",
    "my.toml",
    "other.toml",
    "pairs.jsonl",
    "path/to/model",
    "prompts.jsonl",
    "rewards.py",
    "run.toml",
    "runs/demo",
    "runs/my-run",
}
"""What the reader of test_docs_commands.py has in his folder."""


class Block(NamedTuple):
    """A block of code on a page."""

    page: str
    """Its file, relative to the repository."""
    number: int
    """From 1, of all blocks of the page."""
    language: str
    text: str
    before: str
    """The text between the previous block and this one."""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.number}"

    @property
    def reason_not_to_run(self) -> str:
        """Why no test runs it, from the comment before it; empty: one does."""
        found = re.search(r"<!-- not run: (.+?) -->\s*$", self.before, re.DOTALL)
        return found[1] if found else ""

    @property
    def run_by(self) -> str:
        """The test file that is registered for it, if one is."""
        if self.language == "python":
            return PYTHON_RUN_BY.get(self.page, "")
        return next((test for key, test in RUN_BY.items() if f"{self.page}: {self.text}".startswith(key)), "")


def blocks_of(page: Path, *languages: str) -> list[Block]:
    """Return a page's blocks in these languages, or all of them, in order."""
    text, found, end = page.read_text(), list[Block](), 0
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        code = re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE)
        found.append(Block(name, len(found) + 1, match[2], code, text[end : match.start()]))
        end = match.end()
    return [block for block in found if not languages or block.language in languages]


def all_blocks(*languages: str) -> list[Block]:
    """Return the blocks in these languages of all pages."""
    return [block for page in PAGES for block in blocks_of(page, *languages)]


def lines_of(text: str) -> list[str]:
    """Return the command lines of a block of `sh`, continued lines joined, without comments."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line for line in (re.sub(r"(^|\s+)#.*", "", line).rstrip() for line in lines) if line]
