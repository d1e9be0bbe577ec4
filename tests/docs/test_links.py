"""What a page points at exists: links, their anchors, files in code quotes, pages in the index."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, anchors, links, name, prose

A_FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|cu|md|yaml|json|svg))(?:::\w+)?`")
BASES = (ROOT, ROOT / "tests", ROOT / "hicache")
# Files of other projects, and of a running daemon.
NOT_OURS = ("vllm/", "hicache/config.json")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    missing = []
    for to in links(page):
        file, _, anchor = to.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(to)
    assert not missing


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != DOCS / "decisions"], ids=name
)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """Decision records are left out: they may name what has moved since."""
    named = {file for file in A_FILE.findall(prose(page)) if not file.startswith(NOT_OURS)}
    assert not [file for file in named if not any((base / file).exists() for base in BASES)]


def test_the_index_lists_every_page() -> None:
    index = DOCS / "index.md"
    listed = {(DOCS / to.partition("#")[0]).resolve() for to in links(index)}
    pages = {page.resolve() for page in DOCS.glob("*.md")} - {index.resolve()}
    pages.add((DOCS / "decisions" / "README.md").resolve())
    assert pages <= listed


def test_every_test_that_a_page_names_exists() -> None:
    tests = {
        found
        for file in (ROOT / "tests").rglob("test_*.py")
        for found in re.findall(r"def (test_\w+)", file.read_text())
    }
    named = {
        found for page in PAGES for found in re.findall(r"`(?:[\w/.]+::)?(test_\w+)`", prose(page))
    }
    assert len(named) > 100
    assert not named - tests
