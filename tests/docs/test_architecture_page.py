"""docs/architecture.md follows a match through the files that it runs, and knows the layers."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.docs.request_path import files_of_evictions, path_of_a_match

PAGE = (DOCS / "architecture.md").read_text()
MATCH, REST = PAGE.split("## One match\n")[1].split("\n## One put\n")
WALK, AFTERWARDS = MATCH.split("\nAfter the reply has left")
ROW = re.compile(r"^\| \d+ \| \[(\S+)\]\(\.\./\S+\) \| (.+) \|$", re.M)
FILE = re.compile(r"\[[^\]]+\]\(\.\./([\w/]+\.py)\)")
MOST = 14


@pytest.mark.e2e
def test_a_match_runs_the_files_that_the_page_names() -> None:
    path = path_of_a_match()
    named = set(FILE.findall(WALK))
    assert path.until_reply == named
    assert f"{len(named)} in total" in WALK
    assert set(path.afterwards) == set(FILE.findall(AFTERWARDS))


def test_a_match_is_followed_through_few_files() -> None:
    assert 10 <= len(set(FILE.findall(WALK))) <= MOST


def test_every_name_in_a_walk_is_in_its_file() -> None:
    rows = ROW.findall(MATCH + REST)
    assert len(rows) > 40
    missing = []
    for file, text in rows:
        code = (ROOT / file).read_text()
        for quoted in re.findall(r"`([A-Za-z_.]+)`", text):
            if not quoted.endswith(".py") and not all(part in code for part in quoted.split(".")):
                missing.append((file, quoted))
    assert not missing


def test_the_layers_are_those_of_the_contracts() -> None:
    shown = re.findall(r"^```text layers\n(.*?)^```$", PAGE, re.S | re.M)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert shown[0].splitlines() == contracts["contracts"][0]["layers"]


def test_every_room_is_in_the_table_of_rooms() -> None:
    named = set(re.findall(r"^\| `([\w/]+)`", PAGE, re.M))
    named |= {f"hicache/{name}" for name in ("config", "replay", "bench", "demo")}
    for room in ("hicache", "engine", "tiers", "transfer"):
        for package in (ROOT / room).iterdir():
            is_own = package.is_dir() and not package.is_symlink()
            if is_own and (package / "__init__.py").exists():
                name = str(package.relative_to(ROOT))
                assert name in named or Path(name).parts[0] in ("engine", "tiers"), name


@pytest.mark.e2e
def test_an_eviction_runs_the_files_that_the_page_names() -> None:
    """Those of the daemon, while blocks are demoted; the worker's own are not traced."""
    eviction = REST.split("\n## One eviction\n")[1]
    named = {file for file, _ in ROW.findall(eviction)}
    workers = {"transfer/worker.py", "transfer/copy_thread.py", "transfer/media/disk.py"}
    workers |= {"tiers/disk/disk_tier.py", "engine/plan.py"}  # a plan is made without a call
    assert not named - workers - files_of_evictions()
