"""Links on the repository's Markdown pages, and the navigation of the docs site."""

import re
import runpy
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = runpy.run_path(str(DOCS / "site" / "build_site.py"))
PAGES = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", SITE["without_code"](page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings]
    return {each.strip().lower().replace(" ", "-") for each in words}


def broken_links(page: Path) -> Iterator[str]:
    for match, target in SITE["links"](page):
        if not target.exists():
            yield f"{match[0]}: no such file"
        elif match["anchor"] and target.suffix == ".md" and match["anchor"][1:] not in anchors(target):
            yield f"{match[0]}: no such heading"
    for anchor in re.findall(r"\]\(#([^)]+)\)", SITE["without_code"](page.read_text())):
        if anchor not in anchors(page):
            yield f"#{anchor}: no such heading"


def test_every_relative_link_leads_to_a_file_and_a_heading():
    broken = [f"{page.relative_to(ROOT)}: {link}" for page in PAGES for link in broken_links(page)]
    assert not broken, "\n".join(broken)


def test_a_broken_link_is_seen(tmp_path):
    (tmp_path / "b.md").write_text("# B\n## A `key`, and more\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[1](b.md#a-key-and-more) [2](b.md#c) [3](c.md) [4](#a) [5](https://x.invalid/c.md)\n```\n[6](d.md)\n```\n"
    )
    assert list(broken_links(page)) == ["b.md#c: no such heading", "c.md: no such file", "#a: no such heading"]


def test_a_bar_in_code_of_a_table_has_no_escape_on_the_site():
    assert SITE["without_escapes"](r"| `a \| b` | c \| d |") == r"| `a | b` | c \| d |"


def nav_pages(nav: list[dict[str, object]]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            if isinstance(target, list):
                yield from nav_pages(target)
            else:
                yield str(target)


def test_the_navigation_has_every_page_once():
    listed = list(nav_pages(tomllib.loads((DOCS / "site" / "zensical.toml").read_text())["project"]["nav"]))
    staged = {str(SITE["staged_name"](file)) for file in SITE["site_files"]()}
    assert len(listed) == len(set(listed))
    assert set(listed) <= staged, "pages that do not exist"
    assert {page.name for page in DOCS.glob("*.md")} <= set(listed), "add the page to docs/site/zensical.toml"


@pytest.mark.full
def test_the_site_builds_and_asks_no_other_server(tmp_path):
    zensical = pytest.importorskip("zensical")
    assert zensical
    SITE["stage"].__globals__["BUILD"] = tmp_path
    assert SITE["build"]() == 0
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    loaded = {
        address
        for page in pages
        for address in re.findall(r"""<(?:link|script|img)[^>]+(?:href|src)=["'](https?://[^"']+)""", page.read_text())
    }
    assert loaded == set()
