"""Libraries compiled for a test: what stands in for a driver's own, and the page kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hicache.bench.gpu_check.cpu_kernels import NoCompiler, library


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


def needs_page_kernels() -> None:
    """Skips what runs the page kernels where nothing compiles them."""
    try:
        library()
    except NoCompiler as why:
        pytest.skip(str(why))
