"""Line plots as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

__all__ = ["Line", "Panel", "svg"]

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 240, 56, 28, 180, 28
COLOURS = ("#1f5fa8", "#c0392b", "#7f8c8d", "#27864a")
MAX_TICKS = 8


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]


def svg(panels: Sequence[Panel], x_name: str) -> str:
    """The panels below each other, each scaled to its own points."""
    parts = [_panel(panel, i * HEIGHT) for i, panel in enumerate(panels)]
    height = len(panels) * HEIGHT + 20
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + f'\n<text x="{middle:g}" y="{height - 8}" text-anchor="middle">{escape(x_name)}</text></svg>\n'
    )


def _panel(panel: Panel, offset: float) -> str:
    xs, ys = zip(*[point for line in panel.lines for point in line.points])
    (x_lo, x_hi), (y_lo, y_hi) = _range(xs, 0.0), _range(ys, 0.05)
    bottom, right = offset + HEIGHT - BOTTOM, WIDTH - RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x_lo) / (x_hi - x_lo) * (right - LEFT),
            bottom - (y - y_lo) / (y_hi - y_lo) * (bottom - offset - TOP),
        )

    out = [f'<text x="{LEFT}" y="{offset + 16:g}" font-weight="bold">{escape(panel.title)}</text>']
    for value in _ticks(y_lo, y_hi):
        y = place(x_lo, value)[1]
        out.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for value in _ticks(x_lo, x_hi):
        out.append(f'<text x="{place(value, y_lo)[0]:.1f}" y="{bottom + 14:g}" text-anchor="middle">{value:.4g}</text>')
    for i, line in enumerate(panel.lines):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        y = offset + TOP + 14 + 16 * i
        out.append(f'<text x="{right + 8}" y="{y:g}" fill="{colour}">{escape(line.name)}</text>')
    return "\n".join(out)


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * margin or (0.0 if high > low else 0.5)
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers in the range."""
    size = 10 ** floor(log10((high - low) / MAX_TICKS))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * MAX_TICKS >= high - low)
    return [i * step for i in range(ceil(low / step), floor(high / step) + 1)]
