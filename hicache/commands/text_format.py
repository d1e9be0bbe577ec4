"""The format of figures in the output of commands."""

from typing import Any


def shown_bytes(value: Any) -> str:
    """A number of bytes in about three digits, "–" if unknown."""
    if value is None:
        return "–"
    size, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" or size >= 100 else f"{size:,.1f} {unit}"
