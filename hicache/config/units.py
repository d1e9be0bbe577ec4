"""Sizes and times as an operator writes them, and as the program keeps them.

    8GiB  512MiB  25%  4096        a size: bytes, or a share of what the machine has
    250ms  2s  1m  0.5             a time: seconds
    200GiB/day  8GiB/h             a rate: bytes a day
    400TFLOP/s                     a speed of computing: floating-point operations a second

Pure; used by the models when they read YAML, and by `config show` when it writes values back.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

SIZE_FORM = "a size such as 512MiB, 8GiB or 1TiB, or a whole number of bytes"
SIZE_OR_SHARE_FORM = "a size such as 512MiB, 8GiB or 25%, or a whole number of bytes"
RATE_FORM = "a rate such as 200GiB/day or 8GiB/h, or a whole number of bytes a day"
FLOP_FORM = "a speed such as 400TFLOP/s or 1.2PFLOP/s, or a number of FLOP/s"
SECONDS_FORM = "a time such as 250ms, 2s or 1m, or a number of seconds"

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BYTES_PER: Mapping[str, int] = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SECONDS_PER: Mapping[str, float] = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_FLOP_PER: Mapping[str, float] = {"gflop": 1e9, "tflop": 1e12, "pflop": 1e15}
_PER_DAY: Mapping[str, int] = {"d": 1, "day": 1, "h": 24, "hour": 24}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z%]*)", re.ASCII)


class UnitError(ValueError):
    """Not a size, or not a time; the text says what is allowed."""


@dataclass(frozen=True, slots=True)
class Share:
    """A size as a part of what the machine has, not yet known in bytes."""

    fraction: float

    def __str__(self) -> str:
        return f"{self.fraction * 100:.6g}%"

    def of(self, total_bytes: int) -> int:
        return int(self.fraction * total_bytes)


def parse_size(value: object) -> int:
    """Bytes. Raises UnitError for anything else, a share included."""
    size = _read_size(value)
    if size is None or isinstance(size, Share):
        raise UnitError(SIZE_FORM)
    return size


def parse_size_or_share(value: object) -> int | Share:
    """Bytes, or the share that a percentage says. Raises UnitError for anything else."""
    size = _read_size(value)
    if size is None:
        raise UnitError(SIZE_OR_SHARE_FORM)
    return size


def parse_rate(value: object) -> int:
    """Bytes a day. Raises UnitError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    size, _, per = value.partition("/") if isinstance(value, str) else ("", "", "")
    num_bytes, times = _read_size(size), _PER_DAY.get(per.strip().lower())
    if times is None or not isinstance(num_bytes, int):
        raise UnitError(RATE_FORM)
    return num_bytes * times


def parse_flop_rate(value: object) -> float:
    """FLOP/s. Raises UnitError for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    speed, _, per = value.partition("/") if isinstance(value, str) else ("", "", "")
    quantity = _split(speed)
    times = _FLOP_PER.get(quantity[1].lower()) if quantity else None
    if quantity is None or times is None or per.strip().lower() != "s":
        raise UnitError(FLOP_FORM)
    return float(quantity[0]) * times


def parse_seconds(value: object) -> float:
    """Seconds. Raises UnitError for anything else."""
    if isinstance(value, bool):
        raise UnitError(SECONDS_FORM)
    if isinstance(value, int | float):
        return float(value)
    quantity = _split(value)
    per = _SECONDS_PER.get(quantity[1]) if quantity else None
    if quantity is None or per is None:
        raise UnitError(SECONDS_FORM)
    # Divide by whole units, so that 100ms is 0.1 and not 0.1000…01.
    return float(quantity[0]) / round(1 / per) if per < 1 else float(quantity[0]) * per


def format_size(num_bytes: int) -> str:
    """The shortest exact form where there is one (8GiB), two decimals otherwise (1.43GiB)."""
    for unit, per in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= per:
            whole, rest = divmod(num_bytes, per)
            return f"{whole}{unit}" if rest == 0 else f"{num_bytes / per:.2f}{unit}"
    return f"{num_bytes}B"


def format_rate(bytes_per_day: int) -> str:
    """A form that `parse_rate` reads back, as exact as `format_size`."""
    return f"{format_size(bytes_per_day)}/day"


def format_flop_rate(flop_per_s: float) -> str:
    """A form that `parse_flop_rate` reads back, to six digits."""
    unit, per = (
        ("P", 1e15) if flop_per_s >= 1e15 else ("T", 1e12) if flop_per_s >= 1e12 else ("G", 1e9)
    )
    return f"{flop_per_s / per:.6g}{unit}FLOP/s"


def format_seconds(seconds: float) -> str:
    """A form that `parse_seconds` reads back to the same value, to six digits."""
    if seconds == 0 or 1 <= seconds < 60:
        return f"{seconds:.6g}s"
    if seconds >= 60:
        whole = seconds % 60 == 0
        return f"{seconds / 60:.6g}m" if whole and seconds < 7200 else f"{seconds / 3600:.6g}h"
    for unit, per_second in (("ms", 1e3), ("us", 1e6)):
        if seconds * per_second >= 1:
            return f"{seconds * per_second:.6g}{unit}"
    return f"{seconds * 1e9:.6g}ns"


def _read_size(value: object) -> int | Share | None:
    if isinstance(value, Share):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    quantity = _split(value)
    if quantity is None:
        return None
    number, unit = quantity
    if unit == "%":
        return Share(float(number) / 100)
    per = _BYTES_PER.get(unit.lower())
    return None if per is None else round(float(number) * per)


def _split(value: object) -> tuple[str, str] | None:
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    return (match[1], match[2]) if match else None
