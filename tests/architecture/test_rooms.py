"""How the rooms stand: links to the folders at the top, one identity each, and light clients."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("engine", "tiers", "transfer")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_at_the_top_holds_only_the_identity_guard(room: str) -> None:
    docstring, guard = ast.parse((ROOT / room / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(guard, ast.If)
    link = ROOT / "hicache" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_a_second_identity(room: str) -> None:
    code = f"import hicache.{room}\nimport {room}"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert f"import this room as hicache.{room}" in ran.stderr


@pytest.mark.parametrize("name", ["hicache.client", "hicache.client.aio"])
def test_a_client_is_light(name: str) -> None:
    """An inference engine's process loads msgspec, zmq and numpy, and nothing of the daemon's: what
    is imported by name at run time, which the contracts do not see, included."""
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
