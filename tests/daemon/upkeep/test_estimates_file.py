"""The file of a daemon's estimates: replaced as a whole, and never in the way."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hicache.config import parse_config
from hicache.daemon.upkeep import estimates_file as remembering

KNOWN = {"version": 1, "links": {}, "namespaces": {}}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "estimates.json"
    remembering.write(file, KNOWN)
    assert remembering.read(file) == KNOWN
    assert file.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_nothing_is_there_at_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert remembering.read(tmp_path / "estimates.json") == {}
    assert not caplog.records


@pytest.mark.parametrize(
    "damage", [b"", b"[1]", b"\xff\xfe", b"[" * 100_000, b" " * (remembering.MAX_BYTES + 1)]
)
def test_what_cannot_be_read_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    file = tmp_path / "estimates.json"
    file.write_bytes(damage)
    assert remembering.read(file) == {}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert file.read_bytes() == damage


def test_a_link_in_its_place_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "estimates.json.new").symlink_to(tmp_path / "elsewhere")
    remembering.write(tmp_path / "estimates.json", KNOWN)
    assert not (tmp_path / "elsewhere").exists()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("disk: {size: 1GiB, path: /d}", "/d/estimates.json"),
        ("", "/run/h.sock.estimates.json"),
    ],
)
def test_it_lies_beside_the_blocks_or_the_socket(text: str, expected: str) -> None:
    tiers = "dram: {size: 1GiB}" + (f", {text}" if text else "")
    written = json.dumps({"endpoint": "ipc:///run/h.sock"})
    config = parse_config(f"tiers: {{{tiers}}}\nsocket: {written}\n", "x.yaml").config
    assert remembering.file_for(config) == Path(expected)


def test_a_daemon_without_disk_and_socket_file_keeps_nothing() -> None:
    config = parse_config(
        "tiers: {dram: {size: 1GiB}}\nsocket: {endpoint: 'tcp://127.0.0.1:99'}\n", "x.yaml"
    ).config
    assert remembering.file_for(config) is None
