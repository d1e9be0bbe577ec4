"""The project's pages in Markdown, and what is in them."""

import re
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
PAGES: Final = tuple(sorted({*ROOT.glob("*.md"), *DOCS.rglob("*.md")}))

FENCED = re.compile(r"^```.*?^```$", re.S | re.M)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def prose(page: Path) -> str:
    """A page without its fenced code."""
    return FENCED.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Where its links lead: files of the project, with or without an anchor."""
    return [to for to in LINK.findall(prose(page)) if not to.startswith(("http:", "https:"))]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Its headings as anchors, by GitHub's rule."""
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(prose(page))
    )
