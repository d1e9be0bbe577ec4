"""The server rules that code can check: who may import whom, how large a file grows, what a client
drags in. The table below is the one of the project's style: a wider rule needs a reason here.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("tiers", "transfer", "engine")
MAX_LINES = 700


@dataclass(frozen=True)
class Rule:
    """What the modules of `who` may import of ours, and what else they must not."""

    who: tuple[str, ...]
    ours: tuple[str, ...]
    not_even: tuple[str, ...] = ()


VOCABULARY = ("hicache.tiers.block", "hicache.tiers.arena")
# What an inference engine's process loads.
LIGHT = (
    "hicache.client",
    "hicache.client.*",
    "hicache.connectors",
    "hicache.connectors.*",
    "hicache.protocol",
    "hicache.protocol.*",
)
HEAVY = ("cupy", "lmdb", "psutil", "pydantic", "rich", "click", "yaml")
ENGINES = ("torch", "transformers", "vllm")
IMPURE = (
    "asyncio",
    "multiprocessing",
    "os",
    "random",
    "socket",
    "threading",
    "time",
    "torch",
    "zmq",
)

# The first rule whose `who` fits a module holds for it.
RULES = (
    Rule(VOCABULARY, VOCABULARY, (*HEAVY, *ENGINES, "zmq")),
    Rule(
        ("hicache.tiers.disk", "hicache.tiers.disk.*"),
        ("hicache.tiers.*",),
        ("cupy", "zmq", *ENGINES),
    ),
    Rule(("hicache.tiers.hbm*",), ("hicache.tiers.*",), ("lmdb", "zmq", *ENGINES)),
    Rule(
        ("hicache.tiers", "hicache.tiers.*"),
        ("hicache.tiers.*",),
        ("cupy", "lmdb", "zmq", *ENGINES),
    ),
    Rule(
        ("hicache.engine", "hicache.engine.*"),
        ("hicache.tiers.block", "hicache.engine.*"),
        (*IMPURE, *HEAVY),
    ),
    Rule(
        ("hicache.transfer", "hicache.transfer.*"),
        ("hicache.tiers.*", "hicache.engine.plan", "hicache.transfer.*"),
        ("pydantic", "click", "rich", *ENGINES),
    ),
    Rule(
        ("hicache.connectors", "hicache.connectors.*"),
        (
            "hicache",
            *LIGHT,
            *VOCABULARY,
            "hicache.transfer.gpu_pages.page_kernels",
            "hicache.transfer.gpu_pages.cuda_ipc",
        ),
        HEAVY,
    ),
    Rule(LIGHT, ("hicache", *LIGHT, *VOCABULARY), (*HEAVY, *ENGINES)),
    Rule(("hicache", "hicache.*"), ("hicache", "hicache.*")),
)


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every imported module and its line, those inside functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: a relative import"
                yield from ((name, node.lineno) for name in _targets(node))


def _targets(node: ast.ImportFrom) -> list[str]:
    """`from hicache.tiers import block` imports hicache.tiers.block; the rest names the module."""
    assert node.module is not None
    submodules = [f"{node.module}.{alias.name}" for alias in node.names]
    found = [name for name in submodules if _path_of(name) is not None]
    return found if len(found) == len(submodules) else [node.module, *found]


def _path_of(name: str) -> Path | None:
    """Where one of our modules lies, None if it is no module of ours."""
    if name.partition(".")[0] != "hicache":
        return None
    base = ROOT / name.replace(".", "/")
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.exists()), None)


def read_modules() -> list[Module]:
    files = [("hicache", path) for path in (ROOT / "hicache").rglob("*.py")]
    for room in ROOMS:
        files += [(f"hicache.{room}", path) for path in (ROOT / room).rglob("*.py")]
    modules = {}
    for package, path in files:
        if any(parent.is_symlink() for parent in path.parents if parent != ROOT):
            continue
        inside = path.relative_to(ROOT / package.rpartition(".")[2]).with_suffix("").parts
        name = ".".join((package, *(part for part in inside if part != "__init__")))
        modules[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
    return list(modules.values())


MODULES = read_modules()


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def complaints(module: Module) -> list[str]:
    rule = next(rule for rule in RULES if _fits(module.name, rule.who))
    told = []
    for name, line in module.imports():
        is_ours = name.partition(".")[0] == "hicache"
        is_bad = (is_ours and not _fits(name, rule.ours)) or name.partition(".")[0] in rule.not_even
        if is_bad:
            told.append(
                f"{module.path.relative_to(ROOT)}:{line}: {module.name} may not import {name}"
            )
    return told


def test_all_rooms_are_read() -> None:
    names = {module.name for module in MODULES}
    assert names >= {
        "hicache",
        "hicache.cli",
        "hicache.tiers",
        "hicache.transfer",
        "hicache.engine",
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_imports_go_one_way(module: Module) -> None:
    assert complaints(module) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("hicache.tiers.pool", "import hicache.engine.plan"),
        ("hicache.tiers.pool", "import lmdb"),
        ("hicache.engine.core", "import time"),
        ("hicache.engine.core", "def f():\n    from hicache.tiers import disk"),
        ("hicache.engine.core", "from hicache.transfer.mover import Mover"),
        ("hicache.transfer.mover", "from hicache.engine.core import CacheEngine"),
        ("hicache.client", "from hicache.config import Config"),
        ("hicache.client", "import torch"),
        ("hicache.connectors.transformers", "from hicache.daemon.loop import Daemon"),
        ("hicache.protocol.messages", "from hicache.tiers.dram import DramTier"),
    ],
)
def test_the_table_forbids(name: str, line: str) -> None:
    assert complaints(Module(name, ROOT / "x.py", ast.parse(line)))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("hicache.tiers.disk.disk_tier", "import lmdb"),
        ("hicache.engine.core", "from hicache.engine import plan, index"),
        ("hicache.transfer.mover", "from hicache.engine.plan import Move"),
        ("hicache.client", "from hicache.tiers.arena import Arena"),
        ("hicache.connectors.transformers", "import torch, transformers"),
        ("hicache.daemon.loop", "from hicache.engine.core import CacheEngine"),
    ],
)
def test_the_table_allows(name: str, line: str) -> None:
    assert complaints(Module(name, ROOT / "x.py", ast.parse(line))) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_files_stay_readable(module: Module) -> None:
    assert len(module.path.read_text().splitlines()) <= MAX_LINES
    assert module.path.stem not in ("utils", "util", "helpers", "misc")
    assert ast.get_docstring(module.tree), "a module opens with what it owns"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_hold_only_the_identity_guard(room: str) -> None:
    docstring, guard = ast.parse((ROOT / room / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(guard, ast.If)
    link = ROOT / "hicache" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_refuse_a_second_identity(room: str) -> None:
    code = f"import hicache.{room}\nimport {room}"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert f"import this room as hicache.{room}" in ran.stderr


@pytest.mark.parametrize("name", ["hicache.client", "hicache.client.aio"])
def test_a_client_is_light(name: str) -> None:
    """An inference engine's process gains msgspec, zmq and numpy, and nothing of the daemon's."""
    code = (
        f"import sys, {name}\n"
        "heavy = ('lmdb', 'cupy', 'torch', 'pydantic', 'click', 'rich', 'yaml', 'psutil',\n"
        "         'hicache.daemon', 'hicache.config', 'hicache.engine', 'hicache.transfer')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n"
