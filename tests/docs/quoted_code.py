"""Code in the documents that is quoted from files, so that what a page shows is what a test runs.

    ```python from tests/e2e/archive_tier.py: ArchiveConfig, open_archive
    ```ini from tests/engine/policies/plugin/…/entry_points.txt

After the colon stand definitions of the file's top level; without it the whole file is quoted.
`python -m tests.docs.quoted_code` writes the blocks of all pages anew.
"""

from __future__ import annotations

import ast
import re

from tests.docs.pages import PAGES, ROOT

BLOCK = re.compile(r"^(```\w+ from (\S+?)(?:: ([\w, ]+))?\n)(.*?)^```$", re.S | re.M)


def quoted(file: str, names: str | None) -> str:
    """These definitions of the file, or all of it. Raises KeyError for one that is not there."""
    text = (ROOT / file).read_text()
    if not names:
        return text
    lines = text.splitlines()
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        first = node.lineno
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case _:
                continue
        found[name] = "\n".join(lines[first - 1 : node.end_lineno])
    return "\n\n\n".join(found[name.strip()] for name in names.split(",")) + "\n"


def renewed(page: str) -> str:
    """The page with its blocks as the files are now."""
    return BLOCK.sub(lambda block: f"{block[1]}{quoted(block[2], block[3])}```", page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(renewed(path.read_text()))
