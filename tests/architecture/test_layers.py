"""The contracts of `[tool.importlinter]` hold (`make check` runs them too), and can be broken."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("engine", "tiers", "transfer")
# Module, an import that it must not have, and the contract that says so.
FORBIDDEN = (
    ("hicache.tiers.pool", "hicache.engine.plan", "layers"),
    ("hicache.tiers.dram", "zmq", "no-sockets"),
    ("hicache.tiers.numa", "lmdb", "lmdb"),
    ("hicache.tiers.arena", "cupy", "cupy"),
    ("hicache.tiers.block", "psutil", "client"),
    ("hicache.engine.core", "time", "engine"),
    ("hicache.engine.plan", "hicache.tiers.disk", "engine"),
    ("hicache.engine.settings", "hicache.transfer.mover", "layers"),
    ("hicache.transfer.mover", "hicache.engine.core", "transfer"),
    ("hicache.transfer.worker", "hicache.protocol.messages", "transfer"),
    ("hicache.client.calls", "hicache.config", "layers"),
    ("hicache.client.put", "torch", "client"),
    ("hicache.client.session", "hicache.tiers.pool", "client-tiers"),
    ("hicache.protocol.messages", "hicache.tiers.dram", "layers"),
    ("hicache.connectors.transformers.cached_model", "hicache.daemon.loop", "layers"),
    ("hicache.connectors.transformers.cached_model", "hicache.connectors.vllm", "connectors"),
    ("hicache.connectors.common.staging", "hicache.transfer.mover", "connectors-light"),
    ("hicache.demo.demo_run", "hicache.connectors.vllm.connector", "vllm"),
    ("hicache.daemon.loop", "hicache.client.blocking", "daemon"),
)


def lint(folder: Path) -> str:
    linter = Path(sys.executable).parent / "lint-imports"
    if not linter.exists():
        pytest.skip("needs the extra: pip install .[dev]")
    command = [str(linter), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_the_imports_go_one_way() -> None:
    assert " 0 broken." in lint(ROOT)


def test_every_contract_can_be_broken(tmp_path: Path) -> None:
    """The links to the rooms at the top of the repository are followed as well."""
    for folder in ("hicache", *ROOMS):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    contracts = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(contracts)
    for module, imported, _ in FORBIDDEN:
        path = tmp_path / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        with path.open("a") as file:
            file.write(f"\n\ndef _late() -> None:\n    import {imported}\n")
    reported = lint(tmp_path)
    missed = [f"{a} -> {b}" for a, b, _ in FORBIDDEN if f"{a} -> {b} " not in reported]
    assert missed == [], reported
    ids = {line.split('"')[1] for line in contracts.splitlines() if line.startswith("id = ")}
    assert ids == {contract for _, _, contract in FORBIDDEN}, "one example a contract at least"
