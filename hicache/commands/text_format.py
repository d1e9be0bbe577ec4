"""Figures as commands tell them to people."""

from typing import Any


def told_bytes(value: Any) -> str:
    """A number of bytes in three digits or so, "–" where it is not known."""
    if value is None:
        return "–"
    size, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" or size >= 100 else f"{size:,.1f} {unit}"
