"""Libraries that stand in for a driver's own, compiled for a test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def compiled(source: str, target: Path, *flags: str) -> Path:
    """C as a shared library in the file `target`, which is returned."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: install one that answers to cc")
    file = target.with_name(f"{target.name}.c")
    file.write_text(source)
    command = [compiler, "-shared", "-fPIC", *flags, str(file), "-o", str(target)]
    subprocess.run(command, check=True)
    return target
