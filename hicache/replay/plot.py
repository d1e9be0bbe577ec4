"""Hit ratio against tier size, or against bytes written, a curve per policy: as an HTML page with
inline SVG, or as PNG.

The page needs only a browser; PNG needs matplotlib, which is not a dependency of hicache.
"""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

Point = tuple[float, float]
"""(value on the axis, hit ratio in percent)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What hit ratios are drawn against. `words`: its title. `is_log`: logarithmic."""

    words: str
    unit: str
    is_log: bool


SIZES: Final = Axis("the size in % of the footprint", " %", is_log=True)
DISK_WRITES: Final = Axis("GB written to disk", "", is_log=False)

_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")
_WIDTH, _HEIGHT, _MARGIN = 640, 400, 50


def write_plot(
    path: Path, title: str, curves: Mapping[str, Sequence[Point]], axis: Axis = SIZES
) -> None:
    """Write the plot. Raises click.ClickException if that fails."""
    if path.suffix == ".png":
        _write_png(path, title, curves, axis)
    elif path.suffix in (".html", ".htm"):
        path.write_text(_page(title, curves, axis))
    else:
        raise click.ClickException(f"{path}: a plot is .html or .png")


def _write_png(path: Path, title: str, curves: Mapping[str, Sequence[Point]], axis: Axis) -> None:
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise click.ClickException(
            f"{path}: PNG needs matplotlib, which is not installed; a .html plot needs nothing"
        ) from None
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    scale = "log" if axis.is_log else "linear"
    axes.set(xscale=scale, title=title, xlabel=axis.words, ylabel="hit tokens, %")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def _page(title: str, curves: Mapping[str, Sequence[Point]], axis: Axis) -> str:
    every = [point for points in curves.values() for point in points]
    scaled = math.log if axis.is_log else float
    low = scaled(min(x for x, _ in every)) if axis.is_log else 0.0
    span = scaled(max(x for x, _ in every)) - low or 1.0
    top = max(10.0, math.ceil(max(y for _, y in every) / 10) * 10)

    def place(point: Point) -> tuple[float, float]:
        x = _MARGIN + (scaled(point[0]) - low) / span * (_WIDTH - 2 * _MARGIN)
        return x, _HEIGHT - _MARGIN - point[1] / top * (_HEIGHT - 2 * _MARGIN)

    parts = []
    for y in range(0, int(top) + 1, 10):
        _, at = place((every[0][0], y))
        parts.append(f'<path d="M{_MARGIN} {at:.1f}H{_WIDTH - _MARGIN}" stroke="#ddd"/>')
        parts.append(f'<text x="{_MARGIN - 8}" y="{at + 4:.1f}" text-anchor="end">{y}</text>')
    for x in sorted({x for x, _ in every}):
        at, _ = place((x, 0.0))
        bottom = _HEIGHT - _MARGIN + 18
        parts.append(
            f'<text x="{at:.1f}" y="{bottom}" text-anchor="middle">{x:g}{axis.unit}</text>'
        )
    for number, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(point) for point in sorted(points)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = _MARGIN + 18 * number
        parts.append(f'<text x="{_MARGIN + 10}" y="{y}" fill="{colour}">{html.escape(name)}</text>')
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<h1>{html.escape(title)}</h1><p>Hit tokens in % of input tokens, against "
        f'{axis.words}.</p><svg width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="12">{"".join(parts)}</svg>\n'
    )
