"""Code that a page quotes is that of the file."""

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, name
from tests.docs.quoted_code import BLOCK, renewed


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_it_is_that_of_the_file(page: Path) -> None:
    """`python -m tests.docs.quoted_code` writes it anew."""
    assert renewed(page.read_text()) == page.read_text()


def test_the_worked_examples_are_quoted() -> None:
    """A policy, a tier, an operation, a codec and a connector."""
    files = {file for _, file, _, _ in BLOCK.findall((DOCS / "adding.md").read_text())}
    assert len(files) >= 10
