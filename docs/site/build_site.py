"""Build the docs site into build/docs/site: `python docs/site/build_site.py`, or `make docs`.

Pages link to files beside `docs/` too, as on GitHub: READMEs of examples, settings, code. The site has each file
that a page links to, and links are rewritten to its place there.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = DOCS / "site"
BUILD = ROOT / "build" / "docs"
LINK = re.compile(r"(?<=\]\()(?!https?:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?(?=\))")


def staged_name(file: Path) -> Path:
    """Return a file's place on the site: `docs/a.md` is `a.md`, `examples/b/README.md` is `examples/b.md`."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS)
    place = file.relative_to(ROOT)
    if place.name == "README.md" and place.parent.name:
        return place.parent.with_suffix(".md")
    return Path(place.name.lower()) if place.suffix == ".md" and not place.parent.name else place


def links(file: Path) -> Iterator[tuple[re.Match[str], Path]]:
    """Yield each relative link of a page with the file or folder that it leads to; a folder leads to its README."""
    for match in LINK.finditer(without_code(file.read_text())):
        target = (file.parent / match["path"]).resolve()
        yield match, target / "README.md" if target.is_dir() else target


def without_code(text: str) -> str:
    """Return a page's text with its code blocks blanked, every character in its place."""
    return re.sub(r"^```.*?^```$", lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL | re.MULTILINE)


def site_files() -> list[Path]:
    """Return every file of the site: the pages of `docs/`, and whatever is linked from them or from such a page."""
    found = dict.fromkeys(sorted(DOCS.glob("*.md")))
    waiting = list(found)
    while waiting:
        for _, target in links(waiting.pop()):
            if target.is_file() and target not in found:
                found[target] = None
                if target.suffix == ".md":
                    waiting.append(target)
    return list(found)


def staged_page(file: Path) -> str:
    """Return a page's text with its links as they are on the site."""
    text = file.read_text()
    folder = staged_name(file).parent
    for match, target in reversed(list(links(file))):
        place = os.path.relpath(staged_name(target), folder)
        text = text[: match.start()] + place + (match["anchor"] or "") + text[match.end() :]
    return re.sub(r"^\|.*", lambda row: without_escapes(row[0]), text, flags=re.MULTILINE)


def without_escapes(row: str) -> str:
    """Return a row of a table with plain bars in code: GitHub wants an escape, which Zensical would show."""
    return re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row)


def stage() -> None:
    """Write the site's sources into build/docs."""
    pages = BUILD / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(DOCS / "images", pages / "images")
    shutil.copytree(SITE, pages / "site", ignore=shutil.ignore_patterns("*.py", "*.toml", "__pycache__"))
    for file in site_files():
        place = pages / staged_name(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            place.write_text(staged_page(file))
        else:
            shutil.copyfile(file, place)
    shutil.copyfile(SITE / "zensical.toml", BUILD / "zensical.toml")


def build() -> int:
    """Stage and build; returns Zensical's exit code. A broken link or anchor is an error."""
    stage()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=BUILD, check=False).returncode  # noqa: S603  (arguments are constants)


if __name__ == "__main__":
    sys.exit(build())
