"""The figures of `hicache bench`, and (with a real daemon) that it measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache.bench.report import show_rows
from hicache.bench.rpc import RpcRow
from hicache.bench.store import StoreRow


def test_a_call_beside_its_floor() -> None:
    row = RpcRow.of("match", 8192, [0.001, 0.002, 0.003], [0.001, 0.001, 0.004])
    assert (row.p50_us, row.floor_p50_us, row.ratio, row.n) == (2000.0, 1000.0, 2.0, 3)


def test_gigabytes_are_powers_of_ten() -> None:
    row = StoreRow.of("put", 10**6, 100, [0.1], [0.05])
    assert (row.gb_s, row.floor_gb_s, row.ratio) == (1.0, 2.0, 0.5)


def test_rows_as_data_and_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = StoreRow.of("put", 10**6, 100, [0.1], [0.05])
    show_rows([row], "a title", "-")
    on_stdout = json.loads(capsys.readouterr().out)
    show_rows([row], "a title", str(tmp_path / "rows.json"))
    assert "a title" in capsys.readouterr().out
    assert json.loads((tmp_path / "rows.json").read_text()) == on_stdout
    assert on_stdout == {
        "rows": [
            {
                "op": "put",
                "value_bytes": 10**6,
                "blocks_per_call": 100,
                "gb_s": 1.0,
                "floor_gb_s": 2.0,
                "ratio": 0.5,
                "n": 1,
            }
        ]
    }


def bench(*arguments: str, patience_s: float = 300) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "hicache", "bench", *arguments, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)["rows"]
    assert isinstance(rows, list)
    return rows


@pytest.mark.e2e
@pytest.mark.timeout(320)
def test_bench_rpc() -> None:
    rows = bench("rpc", "--calls", "40")
    assert [(row["op"], row["tokens"]) for row in rows[:3]] == [
        ("ping", 0),
        ("match", 8192),
        ("match_miss", 8192),
    ]
    assert {row["tokens"] for row in rows} == {0, 512, 8192, 32768, 131072}
    assert all(0 < row["p50_us"] <= row["p99_us"] and row["n"] == 40 for row in rows)


@pytest.mark.e2e
@pytest.mark.timeout(320)
def test_bench_store() -> None:
    rows = bench("store", "--calls", "4")
    assert [(row["op"], row["value_bytes"], row["blocks_per_call"]) for row in rows] == [
        ("put", 2 << 20, 32),
        ("fetch", 2 << 20, 32),
        ("put", 256 << 10, 32),
        ("fetch", 256 << 10, 32),
    ]
    assert all(row["gb_s"] > 0 and row["floor_gb_s"] > 0 for row in rows)
