"""README.md does what it says: its commands and snippets marked `run` are run in order, as printed,
in one shell with a daemon of their own; the output that it shows is compared."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text()
SNIPPET = re.compile(r"^```(sh|python) run\n(.*?)^```$", re.S | re.M)
OUTPUT = re.compile(r"^```text output\n(.*?)^```$", re.S | re.M)
TARGET = re.compile(r"`(?:make )?(bench-[a-z]+)`")


def script() -> str:
    """All snippets as one script for bash. A Python snippet is read from the script itself."""
    parts = ["set -eu"]
    for kind, body in SNIPPET.findall(README):
        parts.append(body if kind == "sh" else f"python - <<'PYTHON'\n{body}PYTHON\n")
    return "\n".join(parts)


@pytest.mark.e2e
def test_the_snippets_run_as_printed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    environment = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "HICACHE_ENDPOINT": f"ipc://{tmp_path}/h.sock",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", script()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for shown in OUTPUT.findall(README):
        assert shown in done.stdout


def test_it_has_snippets_to_run() -> None:
    kinds = [kind for kind, _ in SNIPPET.findall(README)]
    assert (kinds.count("sh"), kinds.count("python")) == (2, 2)
    assert len(OUTPUT.findall(README)) == 1


def test_every_bench_that_it_names_is_one() -> None:
    folder = ROOT / "tests" / "bench"
    named = {name.removeprefix("bench-") for name in TARGET.findall(README)}
    assert len(named) == 6
    asked = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--help"],
        cwd=folder.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(re.search(rf"^  {name}\b", asked.stdout, re.M) for name in named)
