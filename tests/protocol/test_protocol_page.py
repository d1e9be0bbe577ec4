"""docs/protocol.md names all that protocol/operations.py declares; its worked example is right."""

import hashlib
import json
import re
from pathlib import Path

import msgpack
import pytest

from hicache.protocol.keys import ROOT_KEY, UNCOUNTED, NamespaceSpec, chain_keys
from hicache.protocol.messages import ERRORS, Reply, encode_tokens
from hicache.tiers import arena
from tests.docs.protocol_reference import PRODUCT, page_with_table, table

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()


def example(language: str, name: str) -> str:
    found = re.search(rf"```{language} {name}\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"no example {name}"
    return found[1]


def unhex(name: str) -> bytes:
    return bytes.fromhex(example("hex", name))


def section(op: str) -> str:
    found = re.search(rf"\n### [^\n]*\b{op}\b[^\n]*\n(.*?)(?=\n##)", PAGE, re.DOTALL)
    assert found, f"no section for {op}"
    return found[1]


@pytest.mark.parametrize("op", sorted(PRODUCT))
def test_every_field_is_named_in_its_operations_section(op: str) -> None:
    text = section(op)
    assert [field for field in PRODUCT[op].fields if f"`{field}`" not in text] == []


@pytest.mark.parametrize("op", sorted(set(PRODUCT) - {"stats"}))
def test_every_field_of_a_reply_is_named_too(op: str) -> None:
    """Of `stats` the page says only that it may grow; its table has the fields."""
    text, reply = section(op), PRODUCT[op].reply
    own = [name for name in reply.__struct_fields__ if name not in Reply.__struct_fields__]
    assert [field for field in own if f"`{field}`" not in text and field != "more"] == []


def test_the_table_of_operations_is_that_of_the_code() -> None:
    """`python -m tests.docs.protocol_reference` writes it."""
    assert page_with_table(PAGE) == PAGE
    assert table() in PAGE


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_every_error_says_what_a_client_must_do(code: str) -> None:
    assert re.search(rf"^\| `{code}` \|[^|]+\|[^|]+\|$", PAGE, re.MULTILINE)


def test_every_field_of_a_spec_is_named() -> None:
    spec = NamespaceSpec.from_wire(json.loads(example("json", "spec")))
    named = [*spec.to_wire(), *spec.to_wire()["groups"][0]]
    assert [field for field in named if f"`{field}`" not in PAGE] == []


def test_the_worked_example() -> None:
    spec = NamespaceSpec.from_wire(json.loads(example("json", "spec")))
    fields = {key: value for key, value in spec.to_wire().items() if key not in UNCOUNTED}
    assert msgpack.unpackb(unhex("encoding")) == fields
    assert spec.digest() == unhex("namespace")
    keys = chain_keys(spec.digest(), ROOT_KEY, encode_tokens(list(range(1, 10))), 16)
    assert b"".join(keys) == unhex("keys")


def test_the_example_can_be_computed_from_the_page_alone() -> None:
    digest = hashlib.blake2b(unhex("encoding"), digest_size=32, person=b"hicache-ns-1")
    assert digest.digest() == unhex("namespace")
    first = unhex("namespace") + bytes(32) + b"".join(n.to_bytes(4, "little") for n in (1, 2, 3, 4))
    assert hashlib.blake2b(first, digest_size=32).digest() == unhex("keys")[:32]


def test_the_arenas_layout(tmp_path: Path) -> None:
    """The offsets of the page, read from a real file."""
    made = arena.Arena.create(tmp_path / "arena", 5 * 4096)
    made.view(3, 4)[:] = [1, 2, 3, 4]
    made.raise_range(3, 1)
    data = made.path.read_bytes()

    def number(offset: int, size: int) -> int:
        return int.from_bytes(data[offset : offset + size], "little")

    assert data[:8] == b"hicarena"
    assert (number(8, 4), number(12, 4), number(16, 8)) == (1, 4096, 5 * 4096)
    assert data[40:72].decode() == made.epoch
    assert [number(4096 + 4 * page, 4) for page in range(5)] == [0, 0, 0, 1, 0]
    start = number(24, 8) + 3 * 4096
    assert data[start : start + 4] == bytes([1, 2, 3, 4])
    made.close()
