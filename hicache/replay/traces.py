"""Reads traces of requests: Mooncake's JSONL, plain or gzip'd, and `hicache serve --record`'s.

One line is one request:

    {"timestamp": 1500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 7, 8],
     "session": "a", "stop": "tool_use"}

`timestamp` in milliseconds; every hash id names one block and depends on all blocks before it
(equal id = same block after the same prefix). `session` and `stop` are optional; an `output_length`
of 0 is unknown. The first line may have `block_tokens` instead (512 in Mooncake's traces), with or
without `block_bytes`. A line with `stop` and no `hash_ids` belongs to the request before it of the
same `session`, and may have its `output_length`. An incomplete last line is ignored: its writer has
not finished, or was killed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

MOONCAKE_BLOCK_TOKENS: Final = 512
SYMBOL_BYTES: Final = 8
"""A block's symbol in the index is its hash id: 8 bytes instead of 2 KiB of tokens."""

GZIP_MAGIC: Final = b"\x1f\x8b"


class TraceError(click.ClickException):
    """The file is not a trace; the message names the line and the reason."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`symbols`: the prompt's hash ids, SYMBOL_BYTES each; the last block may be partial.

    `session` and `stop` are "" where the trace has none."""

    time_s: float
    input_tokens: int
    output_tokens: int
    symbols: bytes
    session: str = ""
    stop: str = ""

    @property
    def num_blocks(self) -> int:
        return len(self.symbols) // SYMBOL_BYTES


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `footprint_blocks`: distinct blocks of the whole trace;
    `block_bytes`: 0 if unknown."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    footprint_blocks: int
    block_bytes: int = 0


def read_trace(path: Path) -> Trace:
    """Read a whole trace. Raises TraceError."""
    sizes = {"block_tokens": MOONCAKE_BLOCK_TOKENS, "block_bytes": 0}
    requests: list[TraceRequest] = []
    newest: dict[str, int] = {}
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "hash_ids" in row:
                newest[str(row.get("session") or "")] = len(requests)
                requests.append(_request(row))
            elif "stop" in row:
                about = newest.get(str(row["session"]))
                if about is not None:
                    output_tokens = row.get("output_length") or requests[about].output_tokens
                    requests[about] = replace(
                        requests[about], stop=str(row["stop"]), output_tokens=int(output_tokens)
                    )
            else:
                sizes.update({name: int(row[name]) for name in sizes if name in row})
                if "block_tokens" not in row:
                    raise KeyError("hash_ids")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            if number == len(lines) > 1 and not line.endswith("\n"):
                break
            what = f"{type(error).__name__}: {error}"
            raise TraceError(f"{path}, line {number}: not a request ({what})") from None
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    requests.sort(key=lambda request: request.time_s)
    footprint = num_distinct(requests)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return Trace(name, sizes["block_tokens"], tuple(requests), footprint, sizes["block_bytes"])


def num_distinct(requests: Sequence[TraceRequest]) -> int:
    """How many distinct blocks these requests have."""
    every = np.frombuffer(b"".join(request.symbols for request in requests), np.uint64)
    return len(np.unique(every))


def _request(row: dict[str, Any]) -> TraceRequest:
    ids = [int(number) & 0xFFFF_FFFF_FFFF_FFFF for number in row["hash_ids"]]
    return TraceRequest(
        float(row["timestamp"]) / 1000.0,
        int(row["input_length"]),
        int(row.get("output_length") or 0),
        np.array(ids, "<u8").tobytes(),
        str(row.get("session") or ""),
        str(row.get("stop") or ""),
    )
