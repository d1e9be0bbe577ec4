"""Wheel, sdist and editable install contain what the tree contains.

The rooms are links. A packaging tool that does not follow links would ship a `hicache` without
them, and every test in the tree would still pass. So the wheel is built, installed into an empty
environment, and every module is imported from `/`.
"""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

# Modules that need an extra, which the empty environment lacks: compared, not imported.
NEEDS_EXTRA = (
    "hicache.commands.demo",
    "hicache.connectors.",
    "hicache.demo",
)


def modules_of_the_tree() -> set[str]:
    """Their paths in a wheel, through the links."""
    rooms = ("tiers", "transfer", "engine")
    own = (path for path in (ROOT / "hicache").rglob("*.py"))
    paths = {path.relative_to(ROOT).as_posix() for path in own}
    for room in rooms:
        inside = (path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py"))
        paths |= {f"hicache/{path.as_posix()}" for path in inside}
    return paths


def run(*command: str, cwd: Path) -> str:
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, so that builds leave no files in this one."""
    copy = tmp_path_factory.mktemp("source")
    names = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "Makefile")
    for name in (*names, "hicache", "tiers", "transfer", "engine", "configs", "docs"):
        run("cp", "-a", str(ROOT / name), str(copy), cwd=ROOT)
    run("find", ".", "-name", "__pycache__", "-prune", "-exec", "rm", "-r", "{}", "+", cwd=copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")
    run(*pip, "--wheel-dir", str(out), str(source), cwd=out)
    [built] = out.glob("hicache-*.whl")
    return built


def test_wheel_holds_the_tree(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == modules_of_the_tree()
    assert "hicache/py.typed" in names
    kernels = {f"hicache/{path.relative_to(ROOT)}" for path in (ROOT / "transfer").rglob("*.c*")}
    assert kernels
    assert names >= {name for name in kernels if name.endswith((".cu", ".cpp"))}
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hicache"}


def test_sdist_holds_the_tree(source: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; from setuptools import build_meta\n"
        f"os.chdir({str(source)!r}); build_meta.build_sdist({str(tmp_path)!r})"
    )
    empty = tmp_path / "env"
    venv.create(empty, with_pip=True)
    run(str(empty / "bin/pip"), "install", "--quiet", "setuptools>=77", cwd=tmp_path)
    run(str(empty / "bin/python"), "-c", code, cwd=tmp_path)
    [built] = tmp_path.glob("hicache-*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= modules_of_the_tree()
    assert names >= {"LICENSE", "README.md", "configs/laptop.yaml", "docs/configuration.md"}


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_every_module_imports_from_the_root(
    editable: bool, wheel: Path, source: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "env"
    venv.create(empty, with_pip=True)
    what = ("--editable", str(source)) if editable else (str(wheel),)
    run(str(empty / "bin/pip"), "install", "--quiet", *what, cwd=tmp_path)
    names = sorted(
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in modules_of_the_tree()
    )
    code = (
        "import importlib, sys\n"
        f"for name in {[name for name in names if not name.startswith(NEEDS_EXTRA)]!r}:\n"
        "    importlib.import_module(name)\n"
    )
    run(str(empty / "bin/python"), "-c", code, cwd=Path("/"))
    assert "hicache, version" in run(str(empty / "bin/hicache"), "--version", cwd=Path("/"))
