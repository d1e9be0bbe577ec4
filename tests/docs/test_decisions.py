"""Decision records: one form, numbered without a gap, listed in docs/decisions/README.md."""

import re

from tests.docs.pages import DOCS

FOLDER = DOCS / "decisions"
RECORDS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
FORM = re.compile(
    r"# (\d{4})\. (.+)\n\nDate: (\d{4}-\d\d-\d\d)\n\n"
    r"## Context\n\n.+## Decision\n\n.+## Figure\n\n.+## What would change it\n\n.+",
    re.S,
)
ROW = re.compile(r"^\| \[(\d{4})\]\((\d{4}-[\w-]+\.md)\) \| (\S+) \| (.+) \|$", re.M)


def test_the_list_names_every_record_as_it_is() -> None:
    listed = ROW.findall((FOLDER / "README.md").read_text())
    found = []
    for path in RECORDS:
        form = FORM.fullmatch(path.read_text())
        assert form, f"{path.name} has not the form of a record"
        found.append((form[1], path.name, form[3], form[2]))
    assert listed == found
    assert [int(row[0]) for row in found] == list(range(1, len(found) + 1))
    assert all(name.startswith(number) for number, name, _, _ in found)
